"""uvicorn's server behind one entrance, with our protocol and a sweep over its connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn

from penstock.http.connection_source import ConnectionSource
from penstock.http.errors import ApiError
from penstock.http.http1 import ServerProtocol

SWEEP_INTERVAL_S = 1.0
RETIRING_KEEP_ALIVE_S = 5.0
"""How long a retiring server keeps idle connections: a client that uses its connection within that time gets
a reply that says it is the last one, instead of a closed connection under its request."""


@dataclass(frozen=True, slots=True)
class Limits:
    """On connections; one server per process, because the protocol keeps some of them for all."""

    header_timeout_s: float
    """Time for a TLS handshake, and for a request to arrive."""
    keep_alive_timeout_s: float
    """Time a connection may be open without a request."""
    max_connections: int
    max_header_bytes: int
    max_backlog: int
    """Bytes of replies that may wait for a client to read them."""


class HttpServer(uvicorn.Server):
    """Serves an ASGI application to the connections of an entrance; says when that is open."""

    def __init__(
        self,
        app: Callable[..., Any],
        source: ConnectionSource,
        limits: Limits,
        tls: ssl.SSLContext | None = None,
        on_listening: Callable[[], None] = lambda: None,
        on_refusal: Callable[[ApiError], None] = lambda error: None,
    ) -> None:
        """``on_refusal`` is told of each request that is answered without the application."""
        ServerProtocol.max_connections = limits.max_connections
        ServerProtocol.max_header_bytes = limits.max_header_bytes
        ServerProtocol.on_refusal = staticmethod(on_refusal)
        ServerProtocol.on_lost = staticmethod(source.on_lost)
        ServerProtocol.max_backlog = limits.max_backlog
        ServerProtocol.ending = False
        config = uvicorn.Config(
            app,
            http=ServerProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=None,
        )
        super().__init__(config)
        self._connection_source = source
        self._limits = limits
        self._tls = tls
        self._on_listening = on_listening
        self._keep_alive_s = limits.keep_alive_timeout_s
        self._retiring = False

    @property
    def connection_count(self) -> int:
        return len(self.server_state.connections)

    @property
    def bytes_queued(self) -> int:
        """Bytes of replies that wait for clients to read them; looks at every connection."""
        return sum(
            connection.transport.get_write_buffer_size()
            for connection in self.server_state.connections
            if isinstance(connection, ServerProtocol)
        )

    async def run_to_the_end(self) -> None:
        """Until :meth:`drain` and the last reply, or :meth:`stop`."""
        sweeper = asyncio.ensure_future(self._sweep())
        try:
            await self.serve()
        finally:
            sweeper.cancel()

    def end_connections(self) -> None:
        """From here on every reply is its connection's last."""
        ServerProtocol.ending = True

    def retire(self) -> None:
        """Leave new connections to others; serve those that are open until they end."""
        self.end_connections()
        self._connection_source.close()
        self._keep_alive_s = min(self._keep_alive_s, RETIRING_KEEP_ALIVE_S)
        self._retiring = True

    def drain(self) -> None:
        """Accept nothing more, close idle connections, let running replies end."""
        self.should_exit = True

    def stop(self) -> None:
        """End without waiting for replies."""
        self.should_exit = self.force_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's affair, not the server's."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.servers = []
        await self._connection_source.open(
            lambda: ServerProtocol(self.config, self.server_state, {}),
            self._tls,
            self._limits.header_timeout_s,
        )
        self.started = True
        self._on_listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._connection_source.close()
        await super().shutdown()

    async def _sweep(self) -> None:
        """Cut clients that do not finish their requests, and connections that idle."""
        header_timeout_s = self._limits.header_timeout_s
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            now = time.monotonic()
            for connection in list(self.server_state.connections):
                if isinstance(connection, ServerProtocol):
                    connection.cut_if_slow(now, header_timeout_s, self._keep_alive_s)
            if self._retiring and not (self.connection_count or self._connection_source.coming):
                self.drain()
