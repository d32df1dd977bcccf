"""The connections to model servers of one client's WebSocket: WebSockets to endpoints that have them."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict

from penstock.gateway.requests.named_response import RESPONSES
from penstock.gateway.responses.held_bytes import HeldBytes
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.endpoint_pool import EndpointPool
from penstock.gateway.upstream.connection_pool import ConnectionPool
from penstock.gateway.upstream.exchange import Exchange, Headers, UpstreamError
from penstock.gateway.websocket.create_message import CreateMessage
from penstock.gateway.websocket.socket_exchange import SocketExchange
from penstock.gateway.websocket.socket_sink import SocketSink
from penstock.gateway.websocket.upstream_socket import NoWebSocketError, UpstreamSocket, open_socket
from penstock.http.errors import ApiError

log = logging.getLogger(__name__)

HAS_NONE = frozenset({404, 405, 426, 501})
"""Statuses by which a server says that it has no WebSocket,"""
HAS_NONE_S = 600.0
"""and for how long that is known, in seconds."""
MAY_HAVE_NONE = frozenset({0, 400, 403, *range(200, 400)})
"""Answers of such servers that may also be due to the client; 0: none has come. The request over HTTP, which
takes the place of the message, tells why."""
MAY_HAVE_NONE_S = 30.0
MAX_MADE = 256
"""Responses that are remembered: a client continues one of the latest."""
MAX_FREE = 4
"""Connections on which nothing runs."""


class UpstreamSockets:
    """Opened when a response needs them. One that is lost takes with it what the server keeps of it."""

    def __init__(self, pool: EndpointPool, target: bytes, headers: Headers, held: HeldBytes) -> None:
        """``target`` and ``headers`` are those of the client's handshake, as endpoints get them."""
        self.pool = pool
        self._target = target
        self._headers = headers
        self._held = held
        self.is_usual = target in (RESPONSES.encode(), pool.own_target(RESPONSES))
        """Whether the client has spelled the path so that what servers answer is not due to that."""
        self._closed = False
        self._sockets: list[tuple[Endpoint, UpstreamSocket]] = []
        """The one that was opened last is the last one."""
        self._made: OrderedDict[str, tuple[Endpoint, UpstreamSocket]] = OrderedDict()
        """Which connection has made a response, by its id: the server need not store it."""

    def maker(self, response: str | None) -> Endpoint | None:
        """The endpoint that made the response on one of the connections."""
        found = None if response is None else self._made.get(response)
        return None if found is None else found[0]

    def learn(self, response: str, endpoint: Endpoint, socket: UpstreamSocket) -> None:
        """The response was made on this connection."""
        self._made[response] = endpoint, socket
        if len(self._made) > MAX_MADE:
            self._made.popitem(last=False)

    def ready(self, endpoint: Endpoint, previous: str | None) -> UpstreamSocket | None:
        """A connection to the endpoint that nothing runs on, at best the one that made the response
        ``previous``; None: there is none."""
        free = [socket for other, socket in self._sockets if other is endpoint and socket.is_free]
        if not free:
            return None
        maker = None if previous is None else self._made.get(previous)
        return maker[1] if maker is not None and maker[1] in free else free[-1]

    async def open(self, endpoint: Endpoint) -> UpstreamSocket:
        """A new connection to the endpoint. Raises UpstreamError, NoWebSocketError."""
        connections = self.pool.connections(endpoint)
        socket = await open_socket(connections, self._target, self._headers, self._held)
        connections.websockets.accepted = True
        if self._closed:
            socket.close()
            raise UpstreamError("the client has gone")
        self._sockets = [each for each in self._sockets if each[1].usable]
        free = [each for _, each in self._sockets if each.is_free]
        for oldest in free[: max(0, len(free) - MAX_FREE)]:
            oldest.close()
        self._sockets.append((endpoint, socket))
        return socket

    def tell(self, message: bytes) -> None:
        """Send a message that concerns what runs: the server sees whether it concerns its response."""
        for _, socket in self._sockets:
            socket.tell(message)

    def check(self) -> None:
        """Called every few seconds. Endpoints that get no more requests lose connections on which nothing
        runs."""
        for endpoint, socket in self._sockets:
            socket.check()
            if socket.is_free and (endpoint.is_withheld or endpoint.removed):
                socket.close()
        self._sockets = [each for each in self._sockets if each[1].usable]

    def close(self) -> None:
        self._closed = True
        for _, socket in self._sockets:
            socket.close()
        self._sockets.clear()


class ResponseConnections:
    """Where one response gets its connection to one endpoint."""

    def __init__(
        self,
        sockets: UpstreamSockets,
        endpoint: Endpoint,
        create: CreateMessage,
        previous: str | None,
        wish: SocketSink,
    ) -> None:
        """``previous``: the response that it continues. Raises UpstreamError when the endpoint was
        removed."""
        self._sockets = sockets
        self.endpoint = endpoint
        self._create = create
        self._previous = previous
        self._wish = wish
        self._http: ConnectionPool = sockets.pool.connections(endpoint)
        self.socket: UpstreamSocket | None = None
        """The WebSocket that it got; None: it got none."""

    @property
    def by_socket(self) -> bool:
        """Whether the endpoint may have a WebSocket."""
        apis = self.endpoint.apis
        spoken = apis is None or "responses" in apis
        return spoken and asyncio.get_running_loop().time() >= self._http.websockets.ask_at

    def acquire_exchange(self, *, fresh: bool = False) -> Exchange | None:
        """See :class:`~penstock.gateway.upstream.connection_pool.ConnectionPool`. Raises ApiError for a
        message that a request over HTTP cannot stand for."""
        if not self.by_socket:
            self._check_http()
            return self._http.acquire_exchange(fresh=fresh)
        socket = None if fresh else self._sockets.ready(self.endpoint, self._previous)
        return self._exchange(socket) if socket is not None and socket.is_silent else None

    async def acquire(self, *, fresh: bool = False) -> Exchange:
        """The same. Raises UpstreamError as well."""
        if self.by_socket:
            await asyncio.sleep(0)  # what waits to be read, such as the end of a connection, is read first
            await asyncio.sleep(0)
            try:
                socket = None if fresh else self._sockets.ready(self.endpoint, self._previous)
                return self._exchange(socket or await self._sockets.open(self.endpoint))
            except NoWebSocketError as error:
                self._note(error)
        self._check_http()
        return await self._http.acquire(fresh=fresh)

    def _exchange(self, socket: UpstreamSocket) -> Exchange:
        self.socket = socket
        return SocketExchange(socket, self._create, self._wish)

    def _note(self, error: NoWebSocketError) -> None:
        """What follows from the answer to a handshake."""
        support, for_s = self._http.websockets, 0.0
        if error.status in HAS_NONE:
            for_s = HAS_NONE_S
        elif error.status in MAY_HAVE_NONE and not support.accepted:
            for_s = MAY_HAVE_NONE_S
        if for_s and self._sockets.is_usual:
            support.ask_at, support.accepted = asyncio.get_running_loop().time() + for_s, False
            log.info("endpoint %s has no WebSocket: %s", self.endpoint.url, error)

    def _check_http(self) -> None:
        if self._create.prewarm:
            self.endpoint.breaker.release_probe(asyncio.get_running_loop().time())
            raise ApiError(
                400,
                "generate: false needs a model server with a WebSocket, and the one of this model has none.",
                param="generate",
                code="unsupported_parameter",
            )
