"""What the workers of a gateway tell each other for better picks, a few times a second.

Scrapes, picks, owners of responses, failures, and openings and closings of circuit breakers are reported
once, through the keeper; requests in flight are read from the scoreboard. All of it may be lost: then a pick
is as good as that of a worker alone. One worker, the first of those that run, scrapes the loads for all;
while nothing comes of it, each scrapes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from penstock.gateway.responses.endpoint_failure import EndpointFailure
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.endpoint_pool import Scrape
from penstock.gateway.routing.router import Router
from penstock.gateway.workers.keeper_link import KeeperLink
from penstock.gateway.workers.letters import WorkerName
from penstock.gateway.workers.scoreboard import Scoreboard

INTERVAL_S = 0.05
IDLE_INTERVAL_S = 0.25
"""The interval while this worker has no request."""
ALONE_INTERVAL_S = 1.0
"""The interval while there are no other workers."""
SILENCE_S = 3.0
"""Time by which a scrape of the worker that scrapes is late, after which each worker scrapes itself."""
MAX_WAITING = 1024
"""Picks, and responses, that wait to be reported; of more in one interval the oldest are left out. A pick has
at most 230 blocks of 9 bytes."""
MAX_ID_CHARACTERS = 256
"""Ids of responses that are longer stay with the worker that knows them."""
TOPIC = "state"

Opening = tuple[str, tuple[float, float, bool]]
Closing = tuple[str, float]
"""Closing of a circuit breaker, by URL, with the time when the request was sent that did it."""
Item = TypeVar("Item")


class StateUpdate(msgspec.Struct, array_like=True):
    """Endpoints are named by their URL."""

    scrapes: list[tuple[str, Scrape]] = []
    picks: list[tuple[str, list[int], int | None]] = []
    """With hashes of the prompt's blocks, and of the session."""
    owners: list[tuple[str, str]] = []
    """Ids of responses."""
    openings: list[Opening] = []
    closings: list[Closing] = []
    failures: list[tuple[str, EndpointFailure]] = []


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(StateUpdate)


class SharedState:
    """One worker's part. ``clock`` is the event loop's, which all processes of a host share."""

    def __init__(
        self,
        link: KeeperLink,
        scoreboard: Scoreboard,
        router: Router,
        clock: Callable[[], float],
        scrape_interval_s: float,
    ) -> None:
        self._link = link
        self._scoreboard = scoreboard
        self._router = router
        self._clock = clock
        self._silence_s = scrape_interval_s + SILENCE_S
        self._known: dict[str, Endpoint] = {}
        """Endpoints by URL."""
        self._by_key: dict[int, Endpoint] = {}
        """Endpoints by their keys on the scoreboard."""
        self._openings: dict[str, float] = {}
        """When the breakers opened of which the siblings know, by URL."""
        self._closings: dict[str, float] = {}
        """When the requests were sent that have closed others, of which they know as well."""
        self._scrapes: deque[tuple[str, Scrape]] = deque(maxlen=MAX_WAITING)
        self._picks: deque[tuple[str, list[int], int | None]] = deque(maxlen=MAX_WAITING)
        self._owners: deque[tuple[str, str]] = deque(maxlen=MAX_WAITING)
        self._failures: deque[tuple[str, EndpointFailure]] = deque(maxlen=MAX_WAITING)
        self._scraped_at = clock()
        """When a scrape of another worker came last."""
        link.on(TOPIC, self._on_update)
        link.on_joined.append(self._on_joined)
        router.picker.on_pick = self._on_pick
        router.owners.on_learn = self._on_learn
        router.pool.on_scrape = self._on_scrape
        router.pool.scrapes = self._scrapes_itself
        router.pool.on_updated.append(self._follow)
        self._follow(router.pool.endpoints)

    def share(self) -> None:
        """Tell what has changed, and count what the others have sent; called every INTERVAL_S,
        IDLE_INTERVAL_S or ALONE_INTERVAL_S."""
        self._count(self._by_key[key] for key in self._scoreboard.changed_keys() & self._by_key.keys())
        update = StateUpdate(_taken(self._scrapes), _taken(self._picks), _taken(self._owners))
        update.failures = _taken(self._failures)
        if self._link.siblings:
            update.openings, update.closings = self._changed_breakers()
            if any(msgspec.structs.astuple(update)):
                self._link.tell_others(TOPIC, _encode(update))

    def _follow(self, endpoints: Sequence[Endpoint]) -> None:
        """Follow these endpoints from now on."""
        known = {each.url: each for each in endpoints}
        added = known.keys() - self._known.keys()
        self._known, self._by_key = known, {hash(url): each for url, each in known.items()}
        self._scoreboard.follow(endpoints)
        self._count(known[url] for url in added)
        for url in added:
            known[url].on_failure = partial(self._on_failure, url)

    def _count(self, endpoints: Iterable[Endpoint]) -> None:
        for endpoint in endpoints:
            endpoint.count_elsewhere(*self._scoreboard.counts_elsewhere(endpoint.url))

    # -- of this worker

    def _on_pick(self, endpoint: Endpoint, blocks: Sequence[int], session: int | None) -> None:
        if self._link.siblings and (blocks or session is not None):
            self._picks.append((endpoint.url, list(blocks), session))

    def _on_learn(self, id: str, endpoint: Endpoint) -> None:
        if self._link.siblings and len(id) <= MAX_ID_CHARACTERS:
            self._owners.append((endpoint.url, id))

    def _on_scrape(self, endpoint: Endpoint, scrape: Scrape) -> None:
        if self._link.siblings:
            self._scrapes.append((endpoint.url, scrape))

    def _on_failure(self, url: str, failure: EndpointFailure) -> None:
        if self._link.siblings:
            self._failures.append((url, failure))

    def _scrapes_itself(self) -> bool:
        siblings = self._link.siblings
        first = not siblings or self._link.own < min(siblings)
        return first or self._clock() - self._scraped_at > self._silence_s

    def _changed_breakers(self) -> tuple[list[Opening], list[Closing]]:
        """Breakers that have opened, and closed, of which the siblings do not know."""
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

    # -- of the others

    def _on_update(self, caller: WorkerName | None, data: bytes) -> None:
        update = _decoder.decode(data)
        router, known = self._router, self._known
        for url, scrape in update.scrapes:
            self._scraped_at = self._clock()
            if (endpoint := known.get(url)) is not None:
                router.pool.apply(endpoint, scrape)
        for url, blocks, session in update.picks:
            if (endpoint := known.get(url)) is not None:
                router.picker.learn(endpoint, blocks, session)
        for url, id in update.owners:
            if (endpoint := known.get(url)) is not None:
                router.owners.learn(id, endpoint, reported=True)
        for url, failure in update.failures:
            if (endpoint := known.get(url)) is not None:
                endpoint.learn_failure(failure)
        for url, (opened_at, until, avoids) in update.openings:
            if (endpoint := known.get(url)) is not None:
                endpoint.breaker.open_as_reported(opened_at, until, avoids=avoids)
        for url, sent_at in update.closings:
            if (endpoint := known.get(url)) is not None:
                endpoint.breaker.close_as_reported(sent_at, self._clock())

    def _on_joined(self, sibling: WorkerName) -> None:
        """Report everything again: the sibling knows nothing yet."""
        self._openings.clear()
        self._closings.clear()
        self._failures.extend((url, each) for url, known in self._known.items() for each in known.failures)


def _taken(waiting: deque[Item]) -> list[Item]:
    """All that waits, and no longer does."""
    taken = list(waiting)
    waiting.clear()
    return taken
