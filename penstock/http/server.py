"""The HTTP server: uvicorn's, with another connection source and protocol, and a sweep for slow clients."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator

import uvicorn

from penstock.http.connection_settings import ConnectionSettings, Limits
from penstock.http.connection_source import ConnectionSource
from penstock.http.errors import ApiError
from penstock.http.http1 import ServerProtocol

SWEEP_INTERVAL_S = 1.0
CROWDED_KEEP_ALIVE_S = 1.0
"""Idle time allowed while connections wait for want of descriptors."""
RETIRING_KEEP_ALIVE_S = 5.0
"""Idle time allowed while the server retires: a client that reuses its connection within it gets a reply with
``connection: close`` instead of a connection that closes under its request."""


class HttpServer(uvicorn.Server):
    """Serves an application to the connections of a source."""

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        source: ConnectionSource,
        limits: Limits,
        *,
        tls: ssl.SSLContext | None = None,
        on_listening: Callable[[], None] = lambda: None,
        on_refusal: Callable[[ApiError], None] = lambda error: None,
    ) -> None:
        """``app`` is called as :class:`ServerProtocol` says, ``on_listening`` once the source is open, and
        ``on_refusal`` for each request that is answered without the application."""
        config = uvicorn.Config(
            app,
            http=ServerProtocol,  # for Config.load alone: startup() makes the connections
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
        self._app = app
        self._connection_source = source
        self._settings = ConnectionSettings(
            limits=limits, on_refusal=on_refusal, on_lost=source.on_lost, is_full=lambda: source.full
        )
        self._tls = tls
        self._on_listening = on_listening
        self._keep_alive_s = limits.keep_alive_timeout_s
        self._retiring = False

    @property
    def connection_count(self) -> int:
        return len(self.server_state.connections)

    @property
    def bytes_queued(self) -> int:
        """Reply bytes that wait for clients, summed over all connections."""
        return sum(
            connection.transport.get_write_buffer_size()
            for connection in self.server_state.connections
            if isinstance(connection, ServerProtocol)
        )

    async def run_to_the_end(self) -> None:
        """Serve until :meth:`drain` and the last reply, or until :meth:`stop`."""
        sweeper = asyncio.ensure_future(self._sweep())
        try:
            await self.serve()
        finally:
            sweeper.cancel()

    def end_connections(self) -> None:
        """Close every connection after its next reply."""
        self._settings.ending = True

    def retire(self) -> None:
        """Stop accepting; serve open connections until they end."""
        self.end_connections()
        self._connection_source.close()
        self._keep_alive_s = min(self._keep_alive_s, RETIRING_KEEP_ALIVE_S)
        self._retiring = True

    def drain(self) -> None:
        """Stop accepting, close idle connections, complete running replies."""
        self.should_exit = True

    def stop(self) -> None:
        """Stop without waiting for replies."""
        self.should_exit = self.force_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The process handles signals, not the server."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.servers = []
        await self._connection_source.open(
            lambda: ServerProtocol(self._app, self.server_state, self._settings),
            self._tls,
            self._settings.limits.header_timeout_s,
        )
        self.started = True
        self._on_listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._connection_source.close()
        await super().shutdown()

    async def _sweep(self) -> None:
        """Every second, close connections that are slow or idle for too long."""
        header_timeout_s = self._settings.limits.header_timeout_s
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            now, keep_alive_s = time.monotonic(), self._keep_alive_s
            if self._connection_source.full:
                keep_alive_s = min(keep_alive_s, CROWDED_KEEP_ALIVE_S)
            for connection in list(self.server_state.connections):
                if isinstance(connection, ServerProtocol):
                    connection.cut_if_slow(now, header_timeout_s, keep_alive_s)
            if self._retiring and not (self.connection_count or self._connection_source.pending):
                self.drain()
