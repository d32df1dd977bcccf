"""Where an API server's connections come from: a listening socket, or the supervisor."""

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
"""Connections that may wait to be accepted, as many as the listener's owner asked for."""
REPORT_AGAIN_S = 0.05
"""Until a report that found no room is tried again."""

Make = Callable[[], asyncio.Protocol]
"""Makes the protocol of a connection."""


class ConnectionSource(Protocol):
    """Gives a server connections from :meth:`open` to :meth:`close`."""

    async def open(self, make: Make, tls: ssl.SSLContext | None, handshake_timeout_s: float) -> None:
        """Begin, with TLS where there is a context."""

    def close(self) -> None:
        """No more connections; those that are open stay. May be called again."""

    def on_lost(self) -> None:
        """A connection of a protocol that was made is closed."""

    @property
    def coming(self) -> int:
        """Connections that were taken and have no protocol yet."""


class ListeningSocket:
    """Accepts on a listening socket, TCP or Unix, alone or beside others that have it."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._server: asyncio.Server | None = None

    async def open(self, make: Make, tls: ssl.SSLContext | None, handshake_timeout_s: float) -> None:
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
    def coming(self) -> int:
        return 0


class HandedOverConnections:
    """Takes connections that the supervisor has accepted, and tells it how many are open."""

    def __init__(self, taker: HandoverReceiver) -> None:
        self._taker = taker
        # Connections on their way to a protocol.
        self._coming: set[asyncio.Task[None]] = set()
        # Those that were taken and are not closed.
        self._open = 0
        self._accepts = False
        self._next_report: asyncio.Handle | None = None

    async def open(self, make: Make, tls: ssl.SSLContext | None, handshake_timeout_s: float) -> None:
        self._accepts = True
        timeout_s = None if tls is None else handshake_timeout_s
        asyncio.get_running_loop().add_reader(self._taker.fileno(), self._take, make, tls, timeout_s)
        self._report()

    def close(self) -> None:
        if self._accepts:
            self._accepts = False
            asyncio.get_running_loop().remove_reader(self._taker.fileno())
            self._report()

    def on_lost(self) -> None:
        self._open -= 1
        if self._accepts:
            self._report_soon()

    @property
    def coming(self) -> int:
        return len(self._coming)

    def _take(self, make: Make, tls: ssl.SSLContext | None, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        for connection in self._taker.receive():
            task = loop.create_task(self._connect(connection, make, tls, timeout_s))
            self._coming.add(task)
            task.add_done_callback(self._coming.discard)
            self._open += 1
        self._report()

    async def _connect(
        self, connection: socket.socket, make: Make, tls: ssl.SSLContext | None, timeout_s: float | None
    ) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                make, connection, ssl=tls, ssl_handshake_timeout=timeout_s
            )
        except OSError as error:  # the client is gone, or speaks another TLS or none
            log.debug("a connection came to nothing: %s", error)
            self.on_lost()

    # -- reports: one for all that a turn of the event loop changes

    def _report_soon(self, delay_s: float = 0.0) -> None:
        if self._next_report is None:
            self._next_report = asyncio.get_running_loop().call_later(delay_s, self._report)

    def _report(self) -> None:
        if self._next_report is not None:
            self._next_report.cancel()
            self._next_report = None
        if not self._taker.report(self._open, accepts=self._accepts):
            self._report_soon(REPORT_AGAIN_S)
        elif not self._accepts:
            self._taker.close()
