"""Connection sources of an HTTP server: a listening socket, or connections that the supervisor hands over."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Protocol

from penstock.wire.handover import HandoverReceiver

log = logging.getLogger(__name__)

BACKLOG = 4096
"""Connections that may wait to be accepted, the same number as in the listener's owner."""
REPORT_AGAIN_S = 0.05
"""Seconds before a report that found no room is repeated."""

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


class ListeningSocket:
    """Accepts on a listening socket, TCP or Unix, which other processes may share."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._server: asyncio.Server | None = None

    async def open(
        self, make: ProtocolFactory, tls: ssl.SSLContext | None, handshake_timeout_s: float
    ) -> None:
        loop = asyncio.get_running_loop()
        create = loop.create_unix_server if self._listener.family == socket.AF_UNIX else loop.create_server
        self._server = await create(
            make,
            sock=self._listener,
            backlog=BACKLOG,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else handshake_timeout_s,
        )

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._listener.close()

    def on_lost(self) -> None:
        pass

    @property
    def pending(self) -> int:
        return 0


class HandedOverConnections:
    """Receives connections that the supervisor has accepted, and reports how many are open."""

    def __init__(self, receiver: HandoverReceiver) -> None:
        self._receiver = receiver
        self._pending: set[asyncio.Task[None]] = set()
        """Tasks that connect accepted connections to their protocols."""
        self._open = 0
        """Received connections that are not closed."""
        self._accepts = False
        self._next_report: asyncio.Handle | None = None

    async def open(
        self, make: ProtocolFactory, tls: ssl.SSLContext | None, handshake_timeout_s: float
    ) -> None:
        self._accepts = True
        timeout_s = None if tls is None else handshake_timeout_s
        asyncio.get_running_loop().add_reader(self._receiver.fileno(), self._receive, make, tls, timeout_s)
        self._report()

    def close(self) -> None:
        if self._accepts:
            self._accepts = False
            asyncio.get_running_loop().remove_reader(self._receiver.fileno())
            self._report()

    def on_lost(self) -> None:
        self._open -= 1
        if self._accepts:
            self._report_soon()

    @property
    def pending(self) -> int:
        return len(self._pending)

    def _receive(self, make: ProtocolFactory, tls: ssl.SSLContext | None, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        for connection in self._receiver.receive():
            task = loop.create_task(self._connect(connection, make, tls, timeout_s))
            self._pending.add(task)
            task.add_done_callback(self._pending.discard)
            self._open += 1
        self._report()

    async def _connect(
        self,
        connection: socket.socket,
        make: ProtocolFactory,
        tls: ssl.SSLContext | None,
        timeout_s: float | None,
    ) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                make, connection, ssl=tls, ssl_handshake_timeout=timeout_s
            )
        except OSError as error:  # the client is gone, or its TLS handshake failed
            log.debug("a handed over connection failed: %s", error)
            self.on_lost()

    # -- reports: one per event loop iteration

    def _report_soon(self, delay_s: float = 0.0) -> None:
        if self._next_report is None:
            self._next_report = asyncio.get_running_loop().call_later(delay_s, self._report)

    def _report(self) -> None:
        if self._next_report is not None:
            self._next_report.cancel()
            self._next_report = None
        if not self._receiver.report(self._open, accepts=self._accepts):
            self._report_soon(REPORT_AGAIN_S)
        elif not self._accepts:
            self._receiver.close()
