"""The two ends of a control channel: the messages of :mod:`penstock.wire.control` over a socket."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

from penstock.wire.control import (
    ChildReport,
    ControlError,
    DrainEngine,
    Heartbeat,
    Info,
    Launch,
    LineBuffer,
    ProcessFailed,
    Progress,
    ProposeState,
    Ready,
    StatesAdopted,
    SupervisorCommand,
    decode_for_child,
    decode_for_supervisor,
    encode,
)

# Read size; a read seldom returns more than one message.
_READ_BYTES = 1 << 16


class ChannelClosed(ConnectionError):
    """The other end of a control channel is closed."""


class SupervisorGone(ChannelClosed):
    """The supervisor closed its end or died: the process ends at once, without draining."""


class ChildGone(ChannelClosed):
    """The child closed its end or died: its exit status follows."""


class ControlChannel:
    """The child's end.

    Owns the descriptor it is given. Reports may be sent from any thread; they block only while the
    supervisor is behind by a full socket buffer. Every method raises :class:`SupervisorGone` when the
    supervisor is gone.
    """

    def __init__(self, fd: int) -> None:
        self._stream = _Stream(socket.socket(fileno=fd), SupervisorGone)
        self._launch: Launch | None = None
        self._reported_ready = False
        self._orders: list[SupervisorCommand] = []

    @property
    def launch(self) -> Launch:
        """What to run as; waits for it the first time. Raises ControlError when something else comes."""
        while self._launch is None:
            for line in self._stream.read(wait=True):
                message = decode_for_child(line)
                if self._launch is None:
                    if not isinstance(message, Launch):
                        raise ControlError(f"expected Launch, got {type(message).__name__}")
                    self._launch = message
                else:
                    self._orders.append(_order(message))
        return self._launch

    @property
    def reported_ready(self) -> bool:
        """Whether :meth:`ready` was called: a failure before it is one of the start."""
        return self._reported_ready

    def fileno(self) -> int:
        """For an event loop's reader: readable when :meth:`receive` has something to say."""
        return self._stream.sock.fileno()

    def receive(self) -> list[SupervisorCommand]:
        """Orders that arrived, possibly none, without waiting.

        Raises SupervisorGone at the end of the file, once every order before it was returned.
        """
        orders, self._orders = self._orders, []
        try:
            orders += [_order(decode_for_child(line)) for line in self._stream.read(wait=False)]
        except SupervisorGone:
            if not orders:
                raise
        return orders

    def progress(self, text: str, fraction: float | None = None) -> None:
        """Reports that the start goes on; ``fraction`` is 0 to 1."""
        self._stream.write(Progress(text=text, fraction=fraction))

    def ready(self, info: Info | None = None) -> None:
        """Reports that the process serves."""
        self._stream.write(Ready(info=info or {}))
        self._reported_ready = True

    def drain_engine(self, rank: int, draining: bool) -> None:
        """Asks that an engine gets new streams no longer, or again."""
        self._stream.write(DrainEngine(rank=rank, draining=draining))

    def propose(self, change: ProposeState) -> None:
        """Asks that a change of a state that all engines have prepared be decided."""
        self._stream.write(change)

    def adopted(self, revision: int) -> None:
        """Confirms that this API server acts by a revision of the agreed states."""
        self._stream.write(StatesAdopted(revision=revision))

    def heartbeat(self) -> None:
        """Reports that an engine's loop turns; nothing when the supervisor is behind."""
        self._stream.offer(Heartbeat())

    def failed(self, message: str, *, fatal: bool) -> None:
        """Reports why the process ends; ``fatal``: it would fail the same way again."""
        self._stream.write(ProcessFailed(message=message, fatal=fatal))

    def forward(self, report: ChildReport) -> None:
        """Reports what another process has, for which this one stands."""
        self._stream.write(report)

    def close(self) -> None:
        self._stream.sock.close()


class ChildChannel:
    """The supervisor's end of one child's channel. Reads never wait."""

    def __init__(self, sock: socket.socket) -> None:
        self._stream = _Stream(sock, ChildGone)

    @classmethod
    def pair(cls) -> tuple[ChildChannel, socket.socket]:
        """The supervisor's end, and the socket to hand to the child and close here after its start."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(ours), theirs

    def fileno(self) -> int:
        return self._stream.sock.fileno()

    def send(self, message: Launch | SupervisorCommand) -> None:
        """Raises ChildGone."""
        self._stream.write(message)

    def offer(self, message: SupervisorCommand) -> None:
        """Sends it unless the child is behind by a full socket buffer. Raises ChildGone."""
        self._stream.offer(message)

    def receive(self) -> list[ChildReport]:
        """Reports that arrived, possibly none. Raises ChildGone at the end of the file, ControlError."""
        return [decode_for_supervisor(line) for line in self._stream.read(wait=False)]

    def close(self) -> None:
        self._stream.sock.close()


def _order(message: Launch | SupervisorCommand) -> SupervisorCommand:
    if isinstance(message, Launch):
        raise ControlError("a second Launch")
    return message


class _Stream:
    """Messages over a socket. ``gone`` is raised at the end of the file and when the peer is closed."""

    def __init__(self, sock: socket.socket, gone: type[ChannelClosed]) -> None:
        sock.setblocking(True)
        self.sock = sock
        self._gone = gone
        self._lines = LineBuffer()
        self._write_lock = threading.Lock()

    def read(self, *, wait: bool) -> list[bytes]:
        """Waits for at least one read, or takes what is there."""
        lines: list[bytes] = []
        while True:
            try:
                data = self.sock.recv(_READ_BYTES, 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return lines
            except ConnectionResetError:
                data = b""  # the peer closed without reading all that was sent to it
            if not data:
                if lines:
                    return lines  # the end is seen again at the next read
                raise self._gone("the other end of the control channel is closed")
            lines += self._lines.feed(data)
            wait = False

    def write(self, message: Any) -> None:
        """Waits while the socket's buffer is full."""
        line = encode(message)
        try:
            with self._write_lock:
                self.sock.sendall(line)
        except ConnectionError as error:
            raise self._gone(str(error)) from error

    def offer(self, message: Any) -> None:
        """Writes unless the socket's buffer is full."""
        line = encode(message)
        try:
            with self._write_lock, contextlib.suppress(BlockingIOError):
                sent = self.sock.send(line, socket.MSG_DONTWAIT)
                self.sock.sendall(line[sent:])
        except ConnectionError as error:
            raise self._gone(str(error)) from error
