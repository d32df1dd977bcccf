"""How many more requests an endpoint takes without a queue of its own: a fixed limit, or one that is
learned."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from penstock.gateway.routing.endpoint import Endpoint

FIRST_LIMIT = 16
"""Requests that an endpoint gets before anything is known of it. vLLM runs 256 at a time by default,
llama.cpp 4 and fewer: the first scrapes correct it."""
MAX_LIMIT = 1 << 16
UNLIMITED = 1 << 30
PAUSE_S = 1e-5
"""Pause for each endpoint after all were asked for a place without success: about ten times what that
took."""


@dataclass(slots=True)
class _Learned:
    """What the scrapes of one endpoint have taught."""

    limit: int = FIRST_LIMIT
    cut: bool = False
    """Whether the endpoint has had a queue: the limit is about right, and grows slowly."""
    scraped_at: float | None = None
    """The scrape that was read last."""


class EndpointCapacity:
    """Counts the free places of endpoints.

    The learned limit follows the scraped load, as TCP's window does. When an endpoint's queue reaches
    ``most_waiting``, the limit is what it runs and such a queue, which keeps it busy between two scrapes.
    While it has none though it gets what the limit allows, the limit grows: it doubles until the first queue,
    and rises by a sixteenth with each scrape after that. Endpoints that report no load have the ``fixed``
    limit or none.
    """

    def __init__(
        self,
        fixed: int | None = None,
        *,
        most_waiting: int = 5,
        most_kv_used: float = 0.95,
        scraping: bool = True,
        elsewhere: Callable[[Endpoint], int] = lambda endpoint: endpoint.in_flight - endpoint.own_in_flight,
    ) -> None:
        """``elsewhere``: requests of other workers at an endpoint."""
        self._fixed = fixed
        self._most_waiting = most_waiting
        self._most_kv_used = most_kv_used
        self._scraping = scraping
        self._elsewhere = elsewhere
        self._learned: dict[Endpoint, _Learned] = {}

    def free(self, endpoint: Endpoint, now: float) -> int:
        """Requests that may be sent to ``endpoint`` now; 0 or less: none."""
        if endpoint.backoff.until > now:
            return 0
        load, in_flight = endpoint.fresh_load(now), endpoint.own_in_flight + self._elsewhere(endpoint)
        if load is None:
            return self._limit_without_load(endpoint) - in_flight
        learned = self._learn(endpoint)
        if load.kv_used >= self._most_kv_used and load.running:
            return 0
        # The scraped counts, with what was sent and what has ended since.
        occupied = load.waiting + load.running + in_flight - endpoint.in_flight_at_scrape
        return (self._fixed or learned.limit) - max(occupied, in_flight)

    def peek(self, endpoint: Endpoint, now: float) -> int:
        """As :meth:`free`, but nothing is learned."""
        known = self._learned.get(endpoint)
        before = None if known is None else replace(known)
        try:
            return self.free(endpoint, now)
        finally:
            self._learned.pop(endpoint, None)
            if before is not None:
                self._learned[endpoint] = before

    def forget(self, endpoint: Endpoint) -> None:
        """The endpoint was removed."""
        self._learned.pop(endpoint, None)

    def _limit_without_load(self, endpoint: Endpoint) -> int:
        """The limit before the first scrape, and when scrapes fail: a busy server may be slow to answer
        them."""
        if self._fixed is not None:
            return self._fixed
        if not (self._scraping and endpoint.reports_load):
            return UNLIMITED
        learned = self._learned.get(endpoint)
        return FIRST_LIMIT if learned is None else learned.limit

    def _learn(self, endpoint: Endpoint) -> _Learned:
        learned = self._learned.get(endpoint)
        if learned is None:
            learned = self._learned[endpoint] = _Learned()
        if learned.scraped_at == endpoint.scraped_at:
            return learned
        learned.scraped_at = endpoint.scraped_at
        load, limit = endpoint.load, learned.limit
        if load.waiting >= self._most_waiting:
            learned.limit, learned.cut = load.running + self._most_waiting, True
        elif load.waiting == 0 and 2 * load.running >= limit and not learned.cut:
            learned.limit = min(2 * limit, MAX_LIMIT)
        elif load.waiting == 0 and load.running >= limit - self._most_waiting:
            learned.limit = min(limit + max(1, limit >> 4), MAX_LIMIT)
        return learned


class CandidateCapacity:
    """The free places of the endpoints that may serve the same requests."""

    def __init__(self, places: EndpointCapacity, endpoints: Callable[[], Iterable[Endpoint]]) -> None:
        self._places = places
        self._endpoints = endpoints
        self._latest: Endpoint | None = None
        """The endpoint that had a place when all were asked last, and is asked first."""
        self._full_until = 0.0
        """All endpoints are asked again after that time, or when fewer places are promised."""
        self._promised = 0

    def have_free(self, promised: int, now: float) -> bool:
        """Whether there are more free places than are promised already. True also when no endpoint is ready:
        nothing is to wait for, and the picker refuses."""
        latest = self._latest
        if latest is not None and latest.is_ready(now) and self._places.free(latest, now) > promised:
            return True
        if now < self._full_until and promised >= self._promised:
            return False
        left, ready, asked = promised, False, 0
        for endpoint in self._endpoints():
            asked += 1
            if endpoint.is_ready(now):
                ready = True
                left -= max(0, self._places.free(endpoint, now))
                if left < 0:
                    self._latest = endpoint
                    return True
        self._latest = None
        if ready:
            self._full_until, self._promised = now + asked * PAUSE_S, promised
        return not ready
