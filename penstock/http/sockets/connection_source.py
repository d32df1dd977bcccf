"""Connection sources of an HTTP server: a listening socket, or connections that the supervisor hands over.

A source takes no more connections at a time than the process has descriptors for: others wait in the
listening socket, or go to another API server. Without descriptors, connections would be reset. While a source
is full, the server closes each connection after its reply, so that those that wait are served.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from penstock.http.sockets.accepting import RETRY_S, accept_waiting
from penstock.http.sockets.descriptors import connection_room, descriptor_limit
from penstock.logging_setup import RateLimitedLog
from penstock.wire.handover import MAX_RECEIVED_AT_ONCE, HandoverReceiver

log = logging.getLogger(__name__)
rarely = RateLimitedLog(log)

BACKLOG = 4096
"""Connections that may wait to be accepted, the same number as in the listener's owner."""
REPORT_AGAIN_S = 0.05
"""Seconds before a report that found no room is repeated."""
FEW = 1024
"""Connections below which the log warns at the start how many there may be."""

ProtocolFactory = Callable[[], asyncio.Protocol]
"""Makes the protocol of one connection."""


class ConnectionSource(Protocol):
    """Gives a server connections from :meth:`open` to :meth:`close`."""

    async def open(
        self, make: ProtocolFactory, tls: ssl.SSLContext | None, handshake_timeout_s: float
    ) -> None:
        """Start, with TLS if there is a context."""

    def close(self) -> None:
        """Stop; open connections stay open. May be called again."""

    def on_lost(self) -> None:
        """A connection whose protocol was made has closed."""

    @property
    def pending(self) -> int:
        """Accepted connections that have no protocol yet."""

    @property
    def full(self) -> bool:
        """Whether there is no descriptor for another connection."""


class _OpenConnections:
    """Connects accepted sockets to their protocols, and counts them until they are lost."""

    def __init__(self, on_full: Callable[[], None], per_connection: int = 1) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        """Tasks that connect accepted sockets to their protocols."""
        self.count = 0
        """Accepted connections that are not closed."""
        self._on_full = on_full
        self._per_connection = per_connection
        self._room = 0
        self._connect: Callable[[socket.socket], Coroutine[Any, Any, object]]
        self._lost: Callable[[], None]

    def open(
        self,
        make: ProtocolFactory,
        tls: ssl.SSLContext | None,
        handshake_timeout_s: float,
        lost: Callable[[], None],
    ) -> None:
        """``lost`` is called for a connection that has failed before it had a protocol."""
        loop = asyncio.get_running_loop()
        timeout_s = None if tls is None else handshake_timeout_s
        self._room = connection_room(self._per_connection)
        if self._room < FEW:
            log.warning(
                "the limit of %d open files (ulimit -n) leaves room for %d connections; others wait",
                descriptor_limit(),
                self._room,
            )
        self._connect = lambda connection: loop.connect_accepted_socket(
            make, connection, ssl=tls, ssl_handshake_timeout=timeout_s
        )
        self._lost = lost

    @property
    def room(self) -> int:
        """Connections that may be added now."""
        return self._room - self.count

    @property
    def full(self) -> bool:
        return self.room < 1

    def report_full(self) -> None:
        """Tell, once a minute, that further connections wait."""
        self._on_full()
        text = "%d connections are open, as many as the limit of open files allows (ulimit -n); others wait"
        rarely("full", text, self.count)

    def add(self, connection: socket.socket) -> None:
        self.count += 1
        task = asyncio.get_running_loop().create_task(self._run(connection))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _run(self, connection: socket.socket) -> None:
        try:
            await self._connect(connection)
        except OSError as error:  # the client is gone, or its TLS handshake failed
            log.debug("an accepted connection failed: %s", error)
            self._lost()


class ListeningSocket:
    """Accepts on a listening socket, TCP or Unix, which other processes may share."""

    def __init__(
        self,
        listener: socket.socket,
        max_connections: int,
        on_full: Callable[[], None] = lambda: None,
        *,
        descriptors_per_connection: int = 1,
    ) -> None:
        """The server refuses connections beyond ``max_connections``; ``on_full`` is called when accepting
        stops for want of descriptors. ``descriptors_per_connection``: see :func:`connection_room`."""
        self._listener = listener
        self._max_connections = max_connections
        self._server: asyncio.Server | None = None
        """With descriptors for every connection: accepts them at two thirds of the CPU time."""
        self._per_connection = descriptors_per_connection
        self._connections = _OpenConnections(on_full, descriptors_per_connection)
        self._accepting = False
        self._resume: asyncio.TimerHandle | None = None
        self._closed = False

    async def open(
        self, make: ProtocolFactory, tls: ssl.SSLContext | None, handshake_timeout_s: float
    ) -> None:
        loop = asyncio.get_running_loop()
        if connection_room(self._per_connection) < self._max_connections + BACKLOG:
            self._listener.setblocking(False)
            self._connections.open(make, tls, handshake_timeout_s, self.on_lost)
            self._set_accepting(True)
            return
        create = loop.create_unix_server if self._listener.family == socket.AF_UNIX else loop.create_server
        self._server = await create(
            make,
            sock=self._listener,
            backlog=BACKLOG,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else handshake_timeout_s,
        )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._set_accepting(False)
        if self._resume is not None:
            self._resume.cancel()
        if self._server is not None:
            self._server.close()
        self._listener.close()

    def on_lost(self) -> None:
        self._connections.count -= 1
        if self._server is None and self._resume is None:
            self._set_accepting(True)

    @property
    def pending(self) -> int:
        return len(self._connections.tasks)

    @property
    def full(self) -> bool:
        return self._server is None and self._connections.full

    def _set_accepting(self, accepting: bool) -> None:
        loop = asyncio.get_running_loop()
        if accepting and not self._accepting and not self._closed:
            loop.add_reader(self._listener.fileno(), self._accept)
        elif self._accepting and not accepting:
            loop.remove_reader(self._listener.fileno())
        self._accepting = accepting and not self._closed

    def _accept(self) -> None:
        waiting = accept_waiting(self._listener, MAX_RECEIVED_AT_ONCE, self._pause)
        while not self._connections.full:
            connection = next(waiting, None)
            if connection is None:
                return
            connection.setblocking(False)
            self._connections.add(connection)
        self._connections.report_full()
        self._set_accepting(False)

    def _pause(self) -> None:
        self._set_accepting(False)
        self._resume = asyncio.get_running_loop().call_later(RETRY_S, self._on_resume)

    def _on_resume(self) -> None:
        self._resume = None
        self._set_accepting(True)


class HandedOverConnections:
    """Receives connections that the supervisor has accepted, and reports how many are open."""

    def __init__(
        self,
        receiver: HandoverReceiver,
        on_full: Callable[[], None] = lambda: None,
        *,
        descriptors_per_connection: int = 1,
    ) -> None:
        """``on_full`` is called when it takes no more for want of descriptors;
        ``descriptors_per_connection``: see :func:`connection_room`."""
        self._receiver = receiver
        self._connections = _OpenConnections(on_full, descriptors_per_connection)
        self._open = False
        self._accepting = False
        self._next_report: asyncio.Handle | None = None

    async def open(
        self, make: ProtocolFactory, tls: ssl.SSLContext | None, handshake_timeout_s: float
    ) -> None:
        self._connections.open(make, tls, handshake_timeout_s, self.on_lost)
        self._open = True
        self._set_accepting(True)
        self._report()

    def close(self) -> None:
        if self._open:
            self._open = False
            self._set_accepting(False)
            self._report()

    def on_lost(self) -> None:
        self._connections.count -= 1
        if self._open:
            self._set_accepting(True)
            self._report_soon()

    @property
    def pending(self) -> int:
        return len(self._connections.tasks)

    @property
    def full(self) -> bool:
        return self._connections.full

    def _set_accepting(self, accepting: bool) -> None:
        loop = asyncio.get_running_loop()
        if accepting and not self._accepting:
            loop.add_reader(self._receiver.fileno(), self._receive)
        elif self._accepting and not accepting:
            loop.remove_reader(self._receiver.fileno())
        self._accepting = accepting

    def _receive(self) -> None:
        for connection in self._receiver.receive(self._connections.room):
            self._connections.add(connection)
        if self._connections.full:
            self._connections.report_full()
            self._set_accepting(False)
        self._report()

    # -- reports: one per event loop iteration

    def _report_soon(self, delay_s: float = 0.0) -> None:
        if self._next_report is None:
            self._next_report = asyncio.get_running_loop().call_later(delay_s, self._report)

    def _report(self) -> None:
        if self._next_report is not None:
            self._next_report.cancel()
            self._next_report = None
        if not self._receiver.report(self._connections.count, accepts=self._accepting):
            self._report_soon(REPORT_AGAIN_S)
        elif not self._open:
            self._receiver.close()
