"""Connections handed over: the supervisor accepts them, API servers serve them.

One pair of Unix datagram sockets per API server. To the server go connections, a descriptor in each message,
and questions, which ask for a report; from the server come reports. The supervisor keeps the server's end as
well: the kernel's queue has the only copy of a connection on its way, so one that the server has not taken,
because it hangs or is dead, can be taken back, and none is lost or served twice.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import NamedTuple

_CONNECTION = b"c"
_QUESTION = b"?"
_REPORT = struct.Struct("<QI?")
MAX_RECEIVED_AT_ONCE = 64
"""Connections that an API server takes before it does something else."""


class HandoverReport(NamedTuple):
    """What an API server says of its connections; the latest one holds."""

    taken: int
    """Connections taken since its start."""
    open: int
    """Those that are open."""
    accepts: bool
    """Whether it wants more."""


class HandoverSender:
    """The supervisor's side of one API server's handover. Nothing waits."""

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
        """Hand a connection over; the caller closes its own descriptor. False: there is no room."""
        try:
            socket.send_fds(self._ours, [_CONNECTION], [connection.fileno()])
        except OSError:  # the queue is full, or more descriptors are on their way than the system allows
            return False
        return True

    def request_report(self) -> None:
        """Ask for a report, unless there is no room: then one comes anyway."""
        with contextlib.suppress(OSError):
            self._ours.send(_QUESTION)

    def report(self) -> HandoverReport | None:
        """The latest one, if any has come since the last call."""
        latest = None
        with contextlib.suppress(BlockingIOError):
            while True:
                latest = HandoverReport._make(_REPORT.unpack(self._ours.recv(_REPORT.size)))
        return latest

    def reclaim(self) -> tuple[int, list[socket.socket]]:
        """The connections that the API server has not taken: how many, and those that could be had; others
        the kernel has closed, because this process has no room for their descriptors."""
        count, connections = 0, []
        with contextlib.suppress(BlockingIOError):
            while True:
                kind, received = _receive(self._theirs)
                count += kind == _CONNECTION
                connections += received
        return count, connections

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


class HandoverReceiver:
    """The API server's side. Nothing waits."""

    def __init__(self, fd: int) -> None:
        """Owns the descriptor."""
        self._sock = socket.socket(fileno=fd)
        self._sock.setblocking(False)
        self._taken = 0
        self._last_report: HandoverReport | None = None
        """The last report; None when another one is due, whatever it says."""

    def fileno(self) -> int:
        """Readable when there is something to take."""
        return self._sock.fileno()

    def receive(self) -> list[socket.socket]:
        """The connections that wait, at most :data:`MAX_RECEIVED_AT_ONCE`; those for whose descriptors this
        process has no room are closed by the kernel."""
        connections: list[socket.socket] = []
        with contextlib.suppress(BlockingIOError):
            for _ in range(MAX_RECEIVED_AT_ONCE):
                kind, received = _receive(self._sock)
                if kind == _CONNECTION:
                    self._taken += 1
                else:
                    self._last_report = None
                connections += received
        return connections

    def report(self, open_connections: int, *, accepts: bool) -> bool:
        """Say what is new. False: there is no room, it has to be said later."""
        report = HandoverReport(self._taken, open_connections, accepts)
        if report != self._last_report:
            try:
                self._sock.send(_REPORT.pack(*report))
            except OSError:  # or the supervisor is gone, which ends this process
                return False
            self._last_report = report
        return True

    def close(self) -> None:
        self._sock.close()


def _receive(sock: socket.socket) -> tuple[bytes, list[socket.socket]]:
    """A message, and the connection that came with it. Raises BlockingIOError when there is none."""
    kind, descriptors, _, _ = socket.recv_fds(sock, len(_CONNECTION), 1)
    return kind, [socket.socket(fileno=fd) for fd in descriptors]
