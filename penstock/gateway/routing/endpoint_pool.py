"""The endpoints of a gateway, their connections, and the scraping of their load."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from penstock.gateway.responses.endpoint_failure import SCRAPE
from penstock.gateway.routing.circuit_breaker import CircuitBreaker
from penstock.gateway.routing.endpoint import Endpoint, EndpointLoad
from penstock.gateway.routing.endpoint_discovery import ResolvedEndpoint
from penstock.gateway.routing.failing_clients import FailingClients
from penstock.gateway.routing.load_scrape import LoadReader, NoLoadError
from penstock.gateway.upstream.connection_pool import ConnectionPool
from penstock.gateway.upstream.exchange import Exchange, UpstreamError, UpstreamRequest
from penstock.gateway.upstream.fetch import TooLargeError, read_reply
from penstock.gateway.upstream.upstream import Upstream

log = logging.getLogger(__name__)

MAX_SCRAPE_BYTES = 4 << 20
"""Maximum size of a scrape. One of vLLM has about 100 KB for each of its engines."""
SCRAPE_S = 10.0
"""Time for one scrape, after which the load that is known stays, and becomes stale. A busy server may take
seconds for its metrics."""
MAX_SCRAPES_PER_S = 400
"""A tenth of a core: a scrape costs some 250 microseconds."""
TURN_S = 0.02
"""Time between two groups of scrapes."""
FAILING_STATUSES = frozenset({500, 502, 503, 504})
"""Scrape statuses of a failing server. Others mean that it has no metrics page, or denies access."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """What came of a scrape. ``failed``: after a connection was made."""

    outcome: Literal["load", "no load", "late", "failed", "no connection"]
    began_at: float
    load: EndpointLoad = field(default_factory=EndpointLoad)
    problem: str = ""


class EndpointPool:
    """Endpoints with their connections. Requests in flight keep the connection of a removed endpoint."""

    def __init__(
        self,
        upstream: Upstream,
        on_removed: Callable[[Endpoint], None],
        root_path: str = "",
    ) -> None:
        """``upstream``: how endpoints are reached of which nothing else is said. ``on_removed`` is called
        with removed endpoints; ``root_path`` is a prefix below which endpoints answer."""
        self._root_path = root_path
        self._upstream = upstream
        self._on_removed = on_removed
        self.on_updated: list[Callable[[list[Endpoint]], None]] = []
        """Called with all endpoints after a change of them or their addresses."""
        self._failing_clients = FailingClients()
        self._known: dict[Hashable, Endpoint] = {}
        """Endpoints by :attr:`ResolvedEndpoint.identity`."""
        self._connections: dict[Endpoint, ConnectionPool] = {}
        self._endpoints: list[Endpoint] = []
        self.scrapes: Callable[[], bool] = lambda: True
        """Whether this process scrapes the endpoints, and not another worker."""
        self.on_scrape: Callable[[Endpoint, Scrape], None] = lambda endpoint, scrape: None
        """Called with each scrape of this process."""

    @property
    def endpoints(self) -> list[Endpoint]:
        """A list that is replaced when it changes."""
        return self._endpoints

    def __contains__(self, endpoint: Endpoint) -> bool:
        """Whether it has not been removed."""
        return endpoint in self._connections

    def update(self, targets: Iterable[ResolvedEndpoint]) -> None:
        """Replace the endpoints; those that stay keep their state and connections."""
        wanted = {target.identity: target for target in targets}
        for identity in [identity for identity in self._known if identity not in wanted]:
            endpoint = self._known.pop(identity)
            log.info("endpoint %s removed", endpoint.url)
            self._connections.pop(endpoint).close()
            self._failing_clients.forget(endpoint.breaker)
            endpoint.removed = True
            self._on_removed(endpoint)
        labels = Counter(target.label for target in wanted.values())
        for identity, target in wanted.items():
            if identity not in self._known:
                label = target.label
                if labels[label] > 1:  # a proxy tells several servers apart by name, an API accounts by key
                    label += f"#{target.pool if target.is_hosted else urlsplit(target.url).hostname}"
                log.info("endpoint %s added", label)
                upstream = target.upstream or self._upstream
                endpoint = Endpoint(label, breaker=CircuitBreaker(self._failing_clients), upstream=upstream)
                endpoint.configured_url = target.url.rstrip("/")
                endpoint.reports_load = not upstream.hosted
                self._known[identity] = endpoint
                self._connections[endpoint] = ConnectionPool(target.url, upstream, address=target.address)
            endpoint = self._known[identity]
            # Envoy connects to addresses, and sends requests as they are
            endpoint.destination = "" if endpoint.upstream.form.rewrites else target.destination
            endpoint.pool, endpoint.role, endpoint.apis = target.pool, target.role, target.apis
        self._endpoints = list(self._connections)
        for on_updated in self.on_updated:
            on_updated(self.endpoints)

    def named(self, url: str) -> list[Endpoint]:
        """The endpoint of this label; or all those of a URL as it was configured."""
        found = [endpoint for endpoint in self._endpoints if endpoint.url == url]
        return found or [endpoint for endpoint in self._endpoints if endpoint.configured_url == url]

    def connections(self, endpoint: Endpoint) -> ConnectionPool:
        """Connections to the endpoint. Raises UpstreamError when it was removed."""
        try:
            return self._connections[endpoint]
        except KeyError:
            raise UpstreamError("the endpoint was removed") from None

    def close(self) -> None:
        for connections in self._connections.values():
            connections.close()

    # -- loads

    async def scrape_loop(self, interval_s: float) -> None:
        """Scrape every endpoint every ``interval_s`` seconds, unless another worker does; less often where
        there are so many that it would take :data:`MAX_SCRAPES_PER_S`. A slow one does not delay the others.
        Scrapes are spread over the interval, all but the first ones, so that streams do not wait for them."""
        loop, running = asyncio.get_running_loop(), dict[Endpoint, asyncio.Task[None]]()
        turns = 1
        try:
            while True:
                endpoints, began = self.endpoints, loop.time()
                took_s = max(interval_s, len(endpoints) / MAX_SCRAPES_PER_S)
                for turn in range(turns):
                    for endpoint in endpoints[turn::turns] if self.scrapes() else ():
                        before = running.get(endpoint)
                        if endpoint.upstream.hosted:
                            continue
                        if (before is None or before.done()) and endpoint in self:
                            running[endpoint] = asyncio.ensure_future(self._scrape(endpoint))
                    await asyncio.sleep(began + (turn + 1) * took_s / turns - loop.time())
                running = {endpoint: task for endpoint, task in running.items() if not task.done()}
                turns = max(1, min(len(self.endpoints), round(took_s / TURN_S)))
        finally:
            for task in running.values():
                task.cancel()

    async def _scrape(self, endpoint: Endpoint) -> None:
        exchange = None
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(SCRAPE_S):
                exchange = await self.connections(endpoint).acquire()
                load = await self._read_load(exchange)
        except NoLoadError as error:
            scrape = Scrape("no load", began, problem=str(error))
        except TimeoutError:
            scrape = Scrape("late" if exchange else "no connection", began, problem="time-out")
        except UpstreamError as error:
            scrape = Scrape("failed" if exchange else "no connection", began, problem=str(error))
        else:
            scrape = Scrape("load", began, load)
        self.on_scrape(endpoint, scrape)
        failures = endpoint.scrape_failures
        self.apply(endpoint, scrape)
        if failures == 1 and endpoint.scrape_failures == 2:  # told once, until it is read again
            endpoint.note_failure(SCRAPE, scrape.problem)

    def apply(self, endpoint: Endpoint, scrape: Scrape) -> None:
        """What a scrape, by this worker or another one, says of the endpoint."""
        now = asyncio.get_running_loop().time()
        match scrape.outcome:
            case "load":
                if endpoint.scrape_failures > 1:
                    log.info("endpoint %s can be scraped again", endpoint.url)
                endpoint.scrape_succeeded(scrape.load, scrape.began_at)
                endpoint.breaker.reached(now, scrape.began_at)
            case "no load":
                if endpoint.reports_load:
                    log.warning("endpoint %s reports no load: %s", endpoint.url, scrape.problem)
                endpoint.scrape_had_no_load()
                endpoint.breaker.reached(now, scrape.began_at)
            case "late":
                if not endpoint.scrapes_late:
                    log.warning("the metrics of endpoint %s take more than %g s", endpoint.url, SCRAPE_S)
                endpoint.scrape_was_late()
            case outcome:
                if endpoint.scrape_failures == 1:
                    log.warning("endpoint %s cannot be scraped: %s", endpoint.url, scrape.problem)
                endpoint.scrape_failed(connected=outcome == "failed")

    def own_target(self, path: str) -> bytes:
        """The target of a request of the gateway's own: some servers answer below their prefix alone."""
        return f"{self._root_path}{path}".encode()

    async def _read_load(self, exchange: Exchange) -> EndpointLoad:
        """Scrape /metrics once. Raises UpstreamError, NoLoadError."""
        request = UpstreamRequest(b"GET", self.own_target("/metrics"), [], b"")
        reader = LoadReader()
        try:
            status = await read_reply(exchange, request, MAX_SCRAPE_BYTES, reader.feed)
        except TooLargeError as error:
            raise NoLoadError(f"its /metrics: {error}") from None
        if status != 200:
            problem = f"its /metrics answered with status {status}"
            raise UpstreamError(problem) if status in FAILING_STATUSES else NoLoadError(problem)
        return reader.load()
