"""The HTTP server: serves an application to the connections of a source, and sweeps for slow clients."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable

from penstock.http.errors import ApiError
from penstock.http.http1.connection import ServerProtocol
from penstock.http.http2.flow_windows import FlowWindows
from penstock.http.request import Application
from penstock.http.server_state import Limits, ServerState
from penstock.http.sockets.connection_source import ConnectionSource

SWEEP_INTERVAL_S = 1.0
CROWDED_KEEP_ALIVE_S = 1.0
"""Idle time allowed while connections wait for want of descriptors."""
RETIRING_KEEP_ALIVE_S = 5.0
"""Idle time allowed while the server retires: a client that reuses its connection within it gets a reply with
``connection: close`` instead of a connection that closes under its request."""
CLOSE_S = 1.0
"""Time for clients to close, after the last reply of a server that drains. Those of idle connections may
never read that it closes, for which it would wait with TLS."""
STOP_S = 0.1
"""Time in which a server that stops still writes what it has, and then what it answers to those that wait."""


class HttpServer:
    """Serves until it is told to drain, retire or stop."""

    def __init__(
        self,
        app: Application,
        source: ConnectionSource,
        limits: Limits,
        *,
        tls: ssl.SSLContext | None = None,
        on_listening: Callable[[], None] = lambda: None,
        on_refusal: Callable[[ApiError], None] = lambda error: None,
        windows: FlowWindows | None = None,
    ) -> None:
        """``app`` is called for each request, ``on_listening`` once the source is open, and
        ``on_refusal`` for each request that is answered without the application. ``windows``: of its HTTP/2
        connections, if the application writes rows."""
        self._app = app
        self._source = source
        self._state = ServerState(
            limits=limits,
            on_refusal=on_refusal,
            on_lost=self._on_lost,
            is_full=lambda: source.full,
            windows=windows or FlowWindows(),
        )
        self._tls = tls
        self._on_listening = on_listening
        self._keep_alive_s = limits.keep_alive_timeout_s
        self._retiring: Callable[[], bool] | None = None
        self._draining = self._stopping = False
        self._changed = asyncio.Event()
        """Set when a connection or task has ended, or when the server is told to."""

    @property
    def connection_count(self) -> int:
        return len(self._state.connections)

    @property
    def bytes_queued(self) -> int:
        """Reply bytes that wait for clients, summed over all connections."""
        return sum(connection.bytes_queued for connection in self._state.connections)

    async def run_to_the_end(self) -> None:
        """Serve until :meth:`drain` and the last reply, or until :meth:`stop`."""
        if not self._draining:
            await self._source.open(
                lambda: ServerProtocol(self._app, self._state),
                self._tls,
                self._state.limits.header_timeout_s,
            )
            self._on_listening()
        sweeper = asyncio.ensure_future(self._sweep())
        try:
            await self._wait_until(lambda: self._draining)
            self._source.close()
            for connection in list(self._state.connections):
                connection.shutdown()
            await self._wait_until(self._is_done)
            await self._connections_end(STOP_S if self._stopping else CLOSE_S)
            for task in self._state.tasks:
                task.cancel()
            if self._state.tasks:
                await self._connections_end(STOP_S)
        finally:
            sweeper.cancel()

    async def _connections_end(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wait_until(lambda: not self._state.connections)

    def end_connections(self) -> None:
        """Close every connection after its next reply."""
        self._state.ending = True

    def retire(self, idle: Callable[[], bool]) -> None:
        """Stop accepting; serve open connections until they end and the application is ``idle``, too."""
        self.end_connections()
        self._source.close()
        self._keep_alive_s = min(self._keep_alive_s, RETIRING_KEEP_ALIVE_S)
        self._retiring = idle

    def drain(self) -> None:
        """Stop accepting, close idle connections, complete running replies."""
        self._draining = True
        self._changed.set()

    def stop(self) -> None:
        """Stop without waiting for replies. What the application still waits for is cancelled."""
        self._draining = self._stopping = True
        self._changed.set()

    def _is_done(self) -> bool:
        state = self._state
        return self._stopping or not (state.tasks or any(not each.is_over for each in state.connections))

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _on_lost(self) -> None:
        self._source.on_lost()
        self._changed.set()

    async def _sweep(self) -> None:
        """Every second, close connections that are slow or idle for too long."""
        header_timeout_s = self._state.limits.header_timeout_s
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            self._state.update_date()
            now, keep_alive_s = self._state.clock(), self._keep_alive_s
            if self._source.full:
                keep_alive_s = min(keep_alive_s, CROWDED_KEEP_ALIVE_S)
            for connection in list(self._state.connections):
                connection.cut_if_slow(now, header_timeout_s, keep_alive_s)
            retiring = self._retiring
            if retiring and not (self.connection_count or self._source.pending) and retiring():
                self.drain()
            self._changed.set()  # a task may have ended after its connection
