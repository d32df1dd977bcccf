"""Passes accepted client connections from the supervisor to an API server, by descriptor (SCM_RIGHTS).

One pair of Unix datagram sockets per API server. The supervisor sends connections, one descriptor per
message, and requests for a report; the server sends reports. The supervisor keeps the server's end open as
well: the kernel's queue has the only copy of a connection in transit, so the supervisor can reclaim one that
a hanging or dead server has not taken. No connection is lost or served twice.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import NamedTuple

_CONNECTION = b"c"
_REPORT_REQUEST = b"?"
_REPORT = struct.Struct("<QI?")
MAX_RECEIVED_AT_ONCE = 64
"""Maximum connections that an API server takes per turn of its loop."""
MAX_REPORTS_AT_ONCE = 1024
"""Maximum reports of one API server that are read per turn of the acceptor."""


class HandoverReport(NamedTuple):
    """Connection counts of an API server; the latest report is valid."""

    taken: int
    """Connections taken since its start."""
    open: int
    """Connections open now."""
    accepts: bool
    """Whether it accepts more."""


class HandoverError(ValueError):
    """A message that is no report, or counts connections that were never sent."""


class HandoverSender:
    """The supervisor's side of one API server's handover. No method blocks."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._ours.setblocking(False)
        self._theirs.setblocking(False)

    def fileno(self) -> int:
        """Readable when there are reports."""
        return self._ours.fileno()

    @property
    def server_end(self) -> int:
        """The descriptor that the API server inherits."""
        return self._theirs.fileno()

    def send(self, connection: socket.socket) -> bool:
        """Send a connection; the caller closes its own descriptor. False: the queue is full."""
        try:
            socket.send_fds(self._ours, [_CONNECTION], [connection.fileno()])
        except OSError:  # full queue, or more descriptors in transit than the system allows
            return False
        return True

    def request_report(self) -> None:
        """Ask for a report, unless the queue is full: then one comes anyway."""
        with contextlib.suppress(OSError):
            self._ours.send(_REPORT_REQUEST)

    def report(self) -> HandoverReport | None:
        """The latest of the reports since the last call, or None; at most MAX_REPORTS_AT_ONCE are read.

        Raises HandoverError.
        """
        latest = None
        with contextlib.suppress(BlockingIOError):
            for _ in range(MAX_REPORTS_AT_ONCE):
                data = self._ours.recv(_REPORT.size + 1)
                if len(data) != _REPORT.size:
                    raise HandoverError(f"a message of {len(data)} bytes instead of a report: {data!r}")
                latest = HandoverReport._make(_REPORT.unpack(data))
        return latest

    def reclaim(self) -> tuple[int, list[socket.socket]]:
        """The connections that the API server has not taken: their number, and those that were received. The
        kernel closes the others if this process is out of descriptors."""
        count, connections = 0, []
        with contextlib.suppress(BlockingIOError):
            while True:
                kind, received = _receive(self._theirs)
                if not kind:  # the API server has shut the socket
                    break
                count += kind == _CONNECTION
                connections += received
        return count, connections

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


class HandoverReceiver:
    """The API server's side. No method blocks."""

    def __init__(self, fd: int) -> None:
        """Owns the descriptor."""
        self._sock = socket.socket(fileno=fd)
        self._sock.setblocking(False)
        self._taken = 0
        self._last_report: HandoverReport | None = None
        """None when a report is due even if nothing has changed."""

    def fileno(self) -> int:
        """Readable when :meth:`receive` has something to take."""
        return self._sock.fileno()

    def receive(self, limit: int = MAX_RECEIVED_AT_ONCE) -> list[socket.socket]:
        """Waiting connections, at most ``limit`` and :data:`MAX_RECEIVED_AT_ONCE`. The kernel closes those
        that this process is out of descriptors for."""
        connections: list[socket.socket] = []
        with contextlib.suppress(BlockingIOError):
            for _ in range(min(limit, MAX_RECEIVED_AT_ONCE)):
                kind, received = _receive(self._sock)
                if kind == _CONNECTION:
                    self._taken += 1
                else:
                    self._last_report = None
                connections += received
        return connections

    def report(self, open_connections: int, *, accepts: bool) -> bool:
        """Send a report if the counts have changed. False: the queue is full, call again later."""
        report = HandoverReport(self._taken, open_connections, accepts)
        if report != self._last_report:
            try:
                self._sock.send(_REPORT.pack(*report))
            except OSError:  # full queue; or the supervisor is gone, and this process exits anyway
                return False
            self._last_report = report
        return True

    def close(self) -> None:
        self._sock.close()


def _receive(sock: socket.socket) -> tuple[bytes, list[socket.socket]]:
    """A message's kind, and the connection in it, if any. Raises BlockingIOError when none waits."""
    kind, descriptors, _, _ = socket.recv_fds(sock, len(_CONNECTION), 1)
    return kind, [socket.socket(fileno=fd) for fd in descriptors]
