"""The connections to one model server, over HTTP/2 if it speaks it and over HTTP/1.1 otherwise."""

from __future__ import annotations

import asyncio
import enum
import logging
import math
from dataclasses import dataclass
from urllib.parse import urlsplit

from penstock.gateway.upstream.exchange import IDLE_S, Exchange, UpstreamError, port_of
from penstock.gateway.upstream.http1_connection import Http1UpstreamConnection
from penstock.gateway.upstream.http2_connection import Http2UpstreamConnection, NotHttp2Error
from penstock.gateway.upstream.upstream import Upstream
from penstock.http.tls_problem import tls_problem

log = logging.getLogger(__name__)

MAX_IDLE = 256
"""Idle connections of HTTP/1.1 kept per endpoint."""
STREAMS_PER_CONNECTION = 64
"""Streams of a connection from which on another one is opened, up to :data:`SHARED_CONNECTIONS`. A server of
several processes, or several servers behind one address, share the load by connections."""
SHARED_CONNECTIONS = 8
"""Connections up to which streams are spread. Beyond, another one is opened only if the server allows no more
streams on these."""
HELLO_S = 2.0
"""Time for a server to answer the beginning of HTTP/2 with its SETTINGS."""
PATIENCE_S = 0.25
"""Time for which requests wait to find out whether a server speaks HTTP/2, before they go over HTTP/1.1."""
SILENT_RETRY_S = 60.0
"""Time after which a server that did not answer is asked again whether it speaks HTTP/2."""


class Version(enum.Enum):
    """The version of HTTP that a server speaks."""

    UNKNOWN = enum.auto()
    HTTP1 = enum.auto()
    HTTP2 = enum.auto()


@dataclass(slots=True)
class WebSocketSupport:
    """What is known of a server's WebSockets."""

    accepted: bool = False
    """It has accepted one."""
    ask_at: float = -math.inf
    """When it is asked again, as it has said that it has none."""


class ConnectionPool:
    """Connections to one endpoint. Times are those of the event loop."""

    def __init__(
        self,
        url: str,
        upstream: Upstream | None = None,
        *,
        address: str | None = None,
    ) -> None:
        """``url`` has a scheme, a host and optionally a port, and a path, which ``upstream`` knows;
        ``address`` is one of the host's addresses. A connection over HTTP/2 breaks after the upstream's time
        between two events without an answer to a PING."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._label = url if address is None else f"{url} ({address})"
        self._name = parts.hostname
        self._address = address or parts.hostname
        self._port = port_of(url)
        self._scheme = parts.scheme.encode()
        self.authority = parts.netloc.encode()
        """Value of the host header."""
        self.upstream = upstream = upstream or Upstream()
        self._connect_timeout_s = upstream.timeouts.connect
        self._http2 = upstream.http2
        self._secure = parts.scheme == "https"
        self._tls = upstream.tls
        self._version = Version.HTTP1 if upstream.http2 == "off" else Version.UNKNOWN
        self._notified = self._version
        """The version in the log: one that the server has proven, and only when it is another one."""
        self._heard = False
        """A server has answered."""
        self._ask_again_at = math.inf
        """When a server that did not answer is asked again."""
        self._opening: asyncio.Task[None] | None = None
        """Finds out the version, or opens another connection over HTTP/2."""
        self._idle: list[Http1UpstreamConnection] = []
        self._shared: list[Http2UpstreamConnection] = []
        """Connections over HTTP/2 that take streams."""
        self._closed = False
        self.websockets = WebSocketSupport()

    # -- taking

    def acquire_exchange(self, *, fresh: bool = False) -> Exchange | None:
        """A stream or an idle connection; None: there is none yet, see :meth:`acquire`. ``fresh``: no idle
        connection."""
        if self._shared:
            return self._take_stream()
        now = asyncio.get_running_loop().time()
        if now >= self._ask_again_at:
            self._ask_again_at = math.inf
            self._open_shared()
        while self._idle and not fresh:
            connection = self._idle.pop()
            if connection.is_silent() and now - connection.idle_since < IDLE_S:
                return connection
            connection.close()
        return None

    async def acquire(self, *, fresh: bool = False) -> Exchange:
        """A stream, an idle connection or a new one. Raises UpstreamError."""
        while True:
            if (taken := self.acquire_exchange(fresh=fresh)) is not None:
                return taken
            if self._version is Version.HTTP1:
                return await self._open_http1()
            opening = self._open_shared()
            await asyncio.wait((opening,), timeout=PATIENCE_S if self._may_fall_back else None)
            if not opening.done():
                return await self._open_http1()
            opening.result()  # raises what went wrong

    @property
    def _may_fall_back(self) -> bool:
        """Whether requests go over HTTP/1.1 until the server has said which version it speaks. Over TLS the
        handshake says it."""
        return self._version is Version.UNKNOWN and self._http2 == "auto" and not self._secure

    def _take_stream(self) -> Exchange | None:
        """A stream of the connection with the fewest, None if none of them has room."""
        connection = None
        for each in self._shared:
            if each.has_room and (connection is None or each.active < connection.active):
                connection = each
        if connection is None:
            return None
        if connection.active >= STREAMS_PER_CONNECTION and len(self._shared) < SHARED_CONNECTIONS:
            self._open_shared()
        return connection.open_exchange()

    # -- opening

    def _open_shared(self) -> asyncio.Task[None]:
        """One more connection over HTTP/2, or the finding that the server does not speak it."""
        if self._opening is None or self._opening.done():
            self._opening = asyncio.ensure_future(self._open_http2())
            self._opening.add_done_callback(_retrieve)
        return self._opening

    async def _open_http2(self) -> None:
        """Raises UpstreamError."""
        connection = await self._connect(with_http2=True)
        try:
            if isinstance(connection, Http2UpstreamConnection):
                await self._greet(connection)
            elif self._http2 == "require":
                connection.close()
                raise NotHttp2Error("TLS has chosen another protocol")
            else:
                self._set_version(Version.HTTP1)
                self._keep(connection)
        except NotHttp2Error as error:
            if self._http2 == "require":
                raise UpstreamError(
                    f"it does not speak HTTP/2 (--upstream-http2 require, or its pool's): {error}"
                ) from None
            self._set_version(Version.HTTP1)

    async def _greet(self, connection: Http2UpstreamConnection) -> None:
        """Wait for the server's SETTINGS. Raises NotHttp2Error."""
        try:
            async with asyncio.timeout(HELLO_S):
                await connection.ready
        except TimeoutError:
            connection.abort()
            self._ask_again_at = asyncio.get_running_loop().time() + SILENT_RETRY_S
            raise NotHttp2Error(f"no SETTINGS came within {HELLO_S:g} s") from None
        except asyncio.CancelledError:
            connection.abort()
            raise
        if self._closed or not connection.has_room:
            connection.retire()
            if self._version is Version.HTTP1:
                raise NotHttp2Error("it requires HTTP/1.1")
            raise UpstreamError("it allows no streams")
        self._set_version(Version.HTTP2)
        self._shared.append(connection)

    async def _open_http1(self) -> Http1UpstreamConnection:
        """Raises UpstreamError."""
        connection = await self._connect(with_http2=False)
        assert isinstance(connection, Http1UpstreamConnection)
        return connection

    async def _connect(self, *, with_http2: bool) -> Http1UpstreamConnection | Http2UpstreamConnection:
        """A connection over HTTP/2 if ``with_http2`` and TLS does not choose another. Raises UpstreamError,
        after which the server may be another one."""
        dial = _Dial(self, with_http2=with_http2)
        await self.dial(dial, with_http2=with_http2)
        return dial.connection

    async def dial(self, protocol: asyncio.Protocol, *, with_http2: bool = False) -> None:
        """A new connection for ``protocol``; ``with_http2``: TLS offers it. Raises UpstreamError, after which
        the server may be another one."""
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await asyncio.get_running_loop().create_connection(
                    lambda: protocol,
                    self._address,
                    self._port,
                    ssl=self._tls.context(with_http2=with_http2) if self._secure else None,
                    server_hostname=(self._tls.server_name or self._name) if self._secure else None,
                )
        except TimeoutError:
            self._forget_version()
            raise UpstreamError(
                f"no connection within {self._connect_timeout_s:g} s"
                + ("; it may not speak TLS: http:// instead?" if self._secure else "")
            ) from None
        except (OSError, ValueError) as error:  # ValueError: the host is no name
            self._forget_version()
            tls = tls_problem(
                error,
                authority=f"{self._tls.name_of('ca_file')} names it",
                name=f"{self._tls.name_of('server_name')} names another",
            )
            raise UpstreamError(f"no connection: {tls or error}") from None

    def make_http1(self) -> Http1UpstreamConnection:
        return Http1UpstreamConnection(self, self.authority)

    def make_http2(self) -> Http2UpstreamConnection:
        return Http2UpstreamConnection(
            self,
            scheme=self._scheme,
            authority=self.authority,
            silence_s=self.upstream.timeouts.event,
        )

    # -- the version

    def _set_version(self, version: Version) -> None:
        self._version = version
        if version is Version.HTTP2:
            self._notify()
            self._close_idle()

    def _notify(self) -> None:
        if self._notified is not self._version:
            self._notified = self._version
            spoken = "2" if self._version is Version.HTTP2 else "1.1"
            log.info("endpoint %s speaks HTTP/%s", self._label, spoken)

    def _forget_version(self) -> None:
        if self._http2 != "off" and not self._shared:
            self._version, self._ask_again_at = Version.UNKNOWN, math.inf

    def on_answered(self) -> None:
        """A reply over HTTP/1.1 has begun."""
        self._heard = True
        if self._version is Version.HTTP1:
            self._notify()

    @property
    def unheard(self) -> str:
        """What may be the reason why a server sends nothing, as a part of a sentence; empty: it has sent."""
        if self._heard or self._secure:
            return ""
        return "; it has never answered: a server that speaks TLS wants https://"

    def on_unanswered(self) -> None:
        """A new connection over HTTP/1.1 got no reply: the server may be another one."""
        self._forget_version()

    def on_http1_required(self) -> None:
        """The server has refused a stream or connection for this reason: it gets everything over HTTP/1.1."""
        if self._http2 == "auto":
            for connection in list(self._shared):
                connection.retire()
            self._set_version(Version.HTTP1)

    # -- keeping

    def release(self, connection: Http1UpstreamConnection) -> None:
        """Take back a connection whose reply is complete, for the next request."""
        if self._closed or len(self._idle) >= MAX_IDLE or self._version is Version.HTTP2:
            connection.close()
            return
        connection.was_used = True
        self._keep(connection)

    def _keep(self, connection: Http1UpstreamConnection) -> None:
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)

    def forget(self, connection: Http1UpstreamConnection) -> None:
        """Remove a closed connection."""
        if connection in self._idle:
            self._idle.remove(connection)

    def on_http2_closed(self, connection: Http2UpstreamConnection) -> None:
        """Remove a connection that takes no further streams."""
        if connection in self._shared:
            self._shared.remove(connection)

    def close(self) -> None:
        """Close idle connections immediately, the others when their replies are complete."""
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()
        self._close_idle()
        for connection in list(self._shared):
            connection.retire()

    def _close_idle(self) -> None:
        for connection in list(self._idle):
            connection.close()
        self._idle.clear()


class _Dial(asyncio.Protocol):
    """A connection whose version is not known until TLS has chosen it."""

    connection: Http1UpstreamConnection | Http2UpstreamConnection

    def __init__(self, pool: ConnectionPool, *, with_http2: bool) -> None:
        self._pool = pool
        self._with_http2 = with_http2

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        tls = transport.get_extra_info("ssl_object")
        chosen = tls is None or tls.selected_alpn_protocol() == "h2"
        http2 = self._with_http2 and chosen
        self.connection = self._pool.make_http2() if http2 else self._pool.make_http1()
        transport.set_protocol(self.connection)
        self.connection.connection_made(transport)


def _retrieve(opening: asyncio.Task[None]) -> None:
    """Nobody may wait for it, which is no reason to warn."""
    if not opening.cancelled():
        opening.exception()
