"""What the workers of a gateway tell each other for better picks, a few times a second.

Counts of requests in flight are sent as numbers, again from time to time; scrapes, picks, owners of
responses, and openings and closings of circuit breakers once. All of it may be lost: then a pick is as good
as that of a worker alone. One worker, the one with the least name, scrapes the loads for all; while nothing
comes of it, each scrapes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

import msgspec

from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.endpoint_pool import Scrape
from penstock.gateway.routing.router import Router
from penstock.gateway.workers.exchange import Exchange, WorkerName
from penstock.logging_setup import RateLimitedLog

_complain = RateLimitedLog(logging.getLogger(__name__))

INTERVAL_S = 0.05
IDLE_INTERVAL_S = 0.25
"""The interval while this worker has no request."""
REPEAT_S = 2.0
"""Counts are sent again after this time, though they have not changed."""
SILENCE_S = 3.0
"""Time by which a scrape of the worker that scrapes is late, after which each worker scrapes itself."""
MAX_WAITING = 1024
"""Picks, and responses, that wait to be sent; of more in one interval the oldest are left out."""
MAX_COUNTS, MAX_SCRAPES, MAX_PICKS = 512, 64, 32
"""Entries in one datagram: a pick has at most 230 blocks of 9 bytes."""
MAX_DATAGRAMS = 4
"""Datagrams in one interval. A socket may take no more than 10 until its owner reads them."""
MAX_ID_CHARACTERS = 256
"""Ids of responses that are longer stay with the worker that knows them."""
TOPIC = "state"

Counts = tuple[int, int, int]
"""Requests in flight, those that the scraped load does not include, and prompt tokens in flight."""
_NONE: Counts = (0, 0, 0)
Opening = tuple[str, tuple[float, float, bool]]
Closing = tuple[str, float]
"""Of a circuit breaker, by URL; a closing with the time when the request was sent that did it."""
Item = TypeVar("Item")


class StateUpdate(msgspec.Struct, array_like=True):
    """Endpoints are named by their URL."""

    counts: list[tuple[str, Counts]] = []
    scrapes: list[tuple[str, Scrape]] = []
    picks: list[tuple[str, list[int], int | None]] = []
    """With hashes of the prompt's blocks, and of the session."""
    owners: list[tuple[str, str]] = []
    """Ids of responses."""
    openings: list[Opening] = []
    closings: list[Closing] = []


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(StateUpdate)


class SharedState:
    """One worker's part. ``clock`` is the event loop's, which all processes of a host share."""

    def __init__(
        self, exchange: Exchange, router: Router, clock: Callable[[], float], scrape_interval_s: float
    ) -> None:
        self._exchange = exchange
        self._router = router
        self._clock = clock
        self._silence_s = scrape_interval_s + SILENCE_S
        self._known: dict[str, Endpoint] = {}
        """Endpoints by URL, as of the latest :meth:`share`."""
        self._sent: dict[str, Counts] = {}
        """Counts that the siblings know."""
        self._repeat_at = 0.0
        self._openings: dict[str, float] = {}
        """When the breakers opened of which the siblings know, by URL."""
        self._closings: dict[str, float] = {}
        """When the requests were sent that have closed others, of which they know as well."""
        self._elsewhere: dict[WorkerName, dict[str, Counts]] = {}
        self._scrapes: deque[tuple[str, Scrape]] = deque(maxlen=MAX_WAITING)
        self._picks: deque[tuple[str, list[int], int | None]] = deque(maxlen=MAX_WAITING)
        self._owners: deque[tuple[str, str]] = deque(maxlen=MAX_WAITING)
        self._scraped_at = clock()
        """When a scrape of another worker came last."""
        exchange.on(TOPIC, self._on_update)
        exchange.on_joined.append(self._on_joined)
        exchange.on_gone.append(self._on_gone)
        router.picker.on_pick = self._on_pick
        router.owners.on_learn = self._on_learn
        router.pool.on_scrape = self._on_scrape
        router.pool.scrapes = self._scrapes_itself

    def share(self) -> None:
        """Sends what has changed; called every INTERVAL_S or IDLE_INTERVAL_S."""
        if not self._exchange.siblings:
            self._forget_waiting()
            return
        self._known = {each.url: each for each in self._router.pool.endpoints}
        counts = self._changed_counts()
        for number in range(MAX_DATAGRAMS):
            update = StateUpdate(
                list(islice(counts, MAX_COUNTS)),
                _taken(self._scrapes, MAX_SCRAPES),
                _taken(self._picks, MAX_PICKS),
                _taken(self._owners, MAX_PICKS),
            )
            if not number:
                update.openings, update.closings = self._changed_breakers()
            if not any(msgspec.structs.astuple(update)):
                return
            self._exchange.send(TOPIC, _encode(update))

    # -- of this worker

    def _on_pick(self, endpoint: Endpoint, blocks: Sequence[int], session: int | None) -> None:
        if self._exchange.siblings and (blocks or session is not None):
            self._picks.append((endpoint.url, list(blocks), session))

    def _on_learn(self, id: str, endpoint: Endpoint) -> None:
        if self._exchange.siblings and len(id) <= MAX_ID_CHARACTERS:
            self._owners.append((endpoint.url, id))

    def _on_scrape(self, endpoint: Endpoint, scrape: Scrape) -> None:
        if self._exchange.siblings:
            self._scrapes.append((endpoint.url, scrape))

    def _scrapes_itself(self) -> bool:
        siblings = self._exchange.siblings
        first = not siblings or self._exchange.own < min(siblings)
        return first or self._clock() - self._scraped_at > self._silence_s

    def _changed_counts(self) -> Iterator[tuple[str, Counts]]:
        now = self._clock()
        if now >= self._repeat_at:
            self._repeat_at = now + REPEAT_S
            self._sent.clear()
            for told in self._elsewhere.values():  # of endpoints that have left
                for url in told.keys() - self._known.keys():
                    del told[url]
        for endpoint in self._known.values():
            counts = endpoint.own_in_flight, endpoint.own_sent, endpoint.own_tokens
            if self._sent.get(endpoint.url) != counts:
                self._sent[endpoint.url] = counts
                yield endpoint.url, counts

    def _changed_breakers(self) -> tuple[list[Opening], list[Closing]]:
        """Those that have opened, and closed, of which the siblings do not know."""
        opened, closed, openings, closings = list[Opening](), list[Closing](), {}, {}
        for url, endpoint in self._known.items():
            if (opening := endpoint.breaker.opening) is not None:
                openings[url] = opening[0]
                if self._openings.get(url) != opening[0]:
                    opened.append((url, opening))
            elif (closed_by := endpoint.breaker.closed_by) is not None:
                closings[url] = closed_by
                if self._closings.get(url) != closed_by:
                    closed.append((url, closed_by))
        self._openings, self._closings = openings, closings
        return opened, closed

    def _forget_waiting(self) -> None:
        for waiting in (self._scrapes, self._picks, self._owners):
            waiting.clear()

    # -- of the others

    def _on_update(self, sender: WorkerName, data: bytes) -> None:
        try:
            update = _decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:  # of another version
            _complain("state", "worker %s tells what is not understood: %s", sender, error)
            return
        router, known = self._router, self._known
        if update.counts:
            told = self._elsewhere.setdefault(sender, {})
            for url, counts in update.counts:
                told[url] = counts
            self._count(update.counts)
        for url, scrape in update.scrapes:
            self._scraped_at = self._clock()
            if (endpoint := known.get(url)) is not None:
                router.pool.apply(endpoint, scrape)
        for url, blocks, session in update.picks:
            if (endpoint := known.get(url)) is not None:
                router.picker.learn(endpoint, blocks, session)
        for url, id in update.owners:
            if (endpoint := known.get(url)) is not None:
                router.owners.learn(id, endpoint, told=True)
        for url, (opened_at, until, avoids) in update.openings:
            if (endpoint := known.get(url)) is not None:
                endpoint.breaker.open_as_told(opened_at, until, avoids=avoids)
        for url, sent_at in update.closings:
            if (endpoint := known.get(url)) is not None:
                endpoint.breaker.close_as_told(sent_at, self._clock())

    def _count(self, counts: Iterable[tuple[str, Counts]]) -> None:
        for url, _ in counts:
            if (endpoint := self._known.get(url)) is not None:
                sums = map(
                    sum, zip(*(told.get(url, _NONE) for told in self._elsewhere.values()), strict=True)
                )
                endpoint.count_elsewhere(*(sums if self._elsewhere else _NONE))

    def _on_joined(self, sibling: WorkerName) -> None:
        """It knows nothing yet."""
        self._sent.clear()
        self._openings.clear()
        self._closings.clear()

    def _on_gone(self, sibling: WorkerName) -> None:
        """Its requests have ended with it, and another worker may have to scrape."""
        gone = self._elsewhere.pop(sibling, {})
        self._count(gone.items())


def _taken(waiting: deque[Item], most: int) -> list[Item]:
    """The first entries that wait, which no longer do."""
    return [waiting.popleft() for _ in range(min(most, len(waiting)))]
