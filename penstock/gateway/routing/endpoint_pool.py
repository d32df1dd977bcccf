"""The endpoints of a gateway, their connections, and the scraping of their load."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from penstock.gateway.routing.endpoint import Endpoint, EndpointLoad
from penstock.gateway.routing.endpoint_discovery import ResolvedEndpoint
from penstock.gateway.routing.load_scrape import LoadReader, NoLoadError
from penstock.gateway.upstream.connection_pool import ConnectionPool, Http2Policy
from penstock.gateway.upstream.exchange import Exchange, Failure, Headers, UpstreamError, UpstreamRequest
from penstock.gateway.upstream.timeouts import Timeouts

log = logging.getLogger(__name__)

MOST_SCRAPE_BYTES = 4 << 20
"""Maximum size of a scrape. One of vLLM has about 100 KB for each of its engines."""
FAILING_STATUSES = frozenset({500, 502, 503, 504})
"""Scrape statuses of a failing server. Others mean that it has no metrics page, or denies access."""


class EndpointPool:
    """Endpoints with their connections. Requests in flight keep the connection of a removed endpoint."""

    def __init__(
        self,
        timeouts: Timeouts,
        on_removed: Callable[[Endpoint], None],
        api_key: str | None = None,
        *,
        http2: Http2Policy = "auto",
    ) -> None:
        """``on_removed`` is called with removed endpoints; ``api_key`` is sent with scrapes."""
        self._timeouts = timeouts
        self._http2 = http2
        self._scrape_headers: Headers = []
        if api_key is not None:
            self._scrape_headers.append((b"authorization", b"Bearer " + api_key.encode()))
        self._on_removed = on_removed
        self._connections: dict[Endpoint, ConnectionPool] = {}

    @property
    def endpoints(self) -> list[Endpoint]:
        return list(self._connections)

    def update(self, targets: Iterable[ResolvedEndpoint]) -> None:
        """Replace the endpoints; those that stay keep their state and connections."""
        wanted = {target.label: target for target in targets}
        known = {endpoint.url: endpoint for endpoint in self._connections}
        for url, endpoint in known.items():
            if url not in wanted:
                log.info("endpoint %s removed", url)
                self._connections.pop(endpoint).close()
                self._on_removed(endpoint)
        for url, target in wanted.items():
            if url not in known:
                log.info("endpoint %s added", url)
                known[url] = Endpoint(url)
                self._connections[known[url]] = ConnectionPool(
                    target.url,
                    address=target.address,
                    connect_timeout_s=self._timeouts.connect,
                    silence_s=self._timeouts.event,
                    http2=self._http2,
                )
            known[url].destination = target.destination

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
        """Scrape every endpoint every ``interval_s`` seconds; a slow endpoint does not delay the others."""
        running: dict[Endpoint, asyncio.Task[None]] = {}
        try:
            while True:
                for endpoint in self.endpoints:
                    before = running.get(endpoint)
                    if before is None or before.done():
                        running[endpoint] = asyncio.ensure_future(self._scrape(endpoint, interval_s))
                running = {endpoint: task for endpoint, task in running.items() if not task.done()}
                await asyncio.sleep(interval_s)
        finally:
            for task in running.values():
                task.cancel()

    async def _scrape(self, endpoint: Endpoint, interval_s: float) -> None:
        began = asyncio.get_running_loop().time()
        exchange = None
        try:
            async with asyncio.timeout(max(2 * interval_s, 1.0)):
                exchange = await self.connections(endpoint).acquire()
                load = await self._read_load(exchange)
        except NoLoadError as error:
            if endpoint.reports_load:
                log.warning("endpoint %s reports no load: %s", endpoint.url, error)
            endpoint.scrape_had_no_load()
        except (UpstreamError, TimeoutError) as error:
            if endpoint.scrape_failures == 1:
                log.warning("endpoint %s cannot be scraped: %s", endpoint.url, str(error) or "time-out")
            endpoint.scrape_failed(connected=exchange is not None)
        else:
            if endpoint.scrape_failures > 1:
                log.info("endpoint %s can be scraped again", endpoint.url)
            endpoint.scrape_succeeded(load, began)

    async def _read_load(self, exchange: Exchange) -> EndpointLoad:
        """Scrape /metrics once. Raises UpstreamError, NoLoadError."""
        page = _ScrapeReceiver(exchange)
        exchange.send(UpstreamRequest(b"GET", b"/metrics", self._scrape_headers, b""), page)
        try:
            status = await page.done
        except asyncio.CancelledError:
            exchange.abort()
            raise
        if status != 200:
            problem = f"its /metrics answered with status {status}"
            raise UpstreamError(problem) if status in FAILING_STATUSES else NoLoadError(problem)
        return page.reader.load()


class _ScrapeReceiver:
    """Receives the reply to a scrape, and reads it as it comes."""

    def __init__(self, exchange: Exchange) -> None:
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """The status. Raises UpstreamError, NoLoadError."""
        self.reader = LoadReader()
        self._exchange = exchange
        self._status = self._size = 0

    def on_head(self, status: int, headers: Headers) -> None:
        self._status = status

    def on_body(self, data: bytes, now: float) -> None:
        self._size += len(data)
        if self._size > MOST_SCRAPE_BYTES:
            self._exchange.abort()
            if not self.done.done():
                self.done.set_exception(NoLoadError(f"its /metrics is larger than {MOST_SCRAPE_BYTES} bytes"))
        elif self._status == 200:
            self.reader.feed(data)

    def on_end(self) -> None:
        if not self.done.done():
            self.done.set_result(self._status)

    def on_broken(self, reason: str, failure: Failure) -> None:
        if not self.done.done():
            self.done.set_exception(UpstreamError(reason))
