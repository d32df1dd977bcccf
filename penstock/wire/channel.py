"""The control channel's two ends: messages of :mod:`penstock.wire.control` over a Unix socket pair."""

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
    Ready,
    StatesAdopted,
    SupervisorCommand,
    decode_for_child,
    decode_for_supervisor,
    encode,
)

# Bytes per read; one read rarely returns more than one message.
_READ_BYTES = 1 << 16


class ChannelClosed(ConnectionError):
    """The other end of a control channel is closed."""


class SupervisorGone(ChannelClosed):
    """The supervisor closed its end or died: this process exits at once, without draining."""


class ChildGone(ChannelClosed):
    """The child closed its end or died: its exit status follows."""


class ControlChannel:
    """The child's end.

    Owns the descriptor it is given. Reports may be sent from any thread; sending blocks only while the
    socket buffer is full. Every method raises :class:`SupervisorGone` when the supervisor is gone.
    """

    def __init__(self, fd: int) -> None:
        self._stream = _Stream(socket.socket(fileno=fd), SupervisorGone)
        self._launch: Launch | None = None
        self._reported_ready = False
        self._commands: list[SupervisorCommand] = []

    @property
    def launch(self) -> Launch:
        """The Launch message; the first access waits for it. Raises ControlError if another message comes."""
        while self._launch is None:
            for line in self._stream.read(wait=True):
                message = decode_for_child(line)
                if self._launch is None:
                    if not isinstance(message, Launch):
                        raise ControlError(f"expected Launch, got {type(message).__name__}")
                    self._launch = message
                else:
                    self._commands.append(_command(message))
        return self._launch

    @property
    def reported_ready(self) -> bool:
        """Whether :meth:`ready` was called. A failure before that is a startup failure."""
        return self._reported_ready

    def fileno(self) -> int:
        """For an event loop's reader: readable when :meth:`receive` would return or raise something."""
        return self._stream.sock.fileno()

    def receive(self) -> list[SupervisorCommand]:
        """Commands that have arrived, possibly none, without waiting.

        Raises SupervisorGone at end of file, after all commands before it were returned.
        """
        commands, self._commands = self._commands, []
        try:
            commands += [_command(decode_for_child(line)) for line in self._stream.read(wait=False)]
        except SupervisorGone:
            if not commands:
                raise
        return commands

    def progress(self, text: str, fraction: float | None = None) -> None:
        """Reports startup progress; ``fraction`` is 0 to 1."""
        self._stream.write(Progress(text=text, fraction=fraction))

    def ready(self, info: Info | None = None) -> None:
        """Reports that the process serves."""
        self._stream.write(Ready(info=info or {}))
        self._reported_ready = True

    def drain_engine(self, rank: int, draining: bool) -> None:
        """Asks that an engine stop getting new streams, or get them again."""
        self._stream.write(DrainEngine(rank=rank, draining=draining))

    def adopted(self, revision: int) -> None:
        """Confirms that this API server applies a revision of the agreed states."""
        self._stream.write(StatesAdopted(revision=revision))

    def heartbeat(self) -> None:
        """Reports that an engine's loop runs; dropped when the socket buffer is full."""
        self._stream.offer(Heartbeat())

    def failed(self, message: str, *, fatal: bool) -> None:
        """Reports why the process exits; ``fatal``: a restart would fail the same way."""
        self._stream.write(ProcessFailed(message=message, fatal=fatal))

    def forward(self, report: ChildReport) -> None:
        """Sends a report that was made elsewhere: a proposal, or one of a process that this one proxies."""
        self._stream.write(report)

    def close(self) -> None:
        self._stream.sock.close()


class ChildChannel:
    """The supervisor's end of one child's channel. Reads never block."""

    def __init__(self, sock: socket.socket) -> None:
        self._stream = _Stream(sock, ChildGone)

    @classmethod
    def pair(cls) -> tuple[ChildChannel, socket.socket]:
        """The supervisor's end, and the child's socket, to be closed here once the child has started."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(ours), theirs

    def fileno(self) -> int:
        return self._stream.sock.fileno()

    def send(self, message: Launch | SupervisorCommand) -> None:
        """Raises ChildGone."""
        self._stream.write(message)

    def offer(self, message: SupervisorCommand) -> None:
        """Sends ``message`` unless the socket buffer is full. Raises ChildGone."""
        self._stream.offer(message)

    def receive(self) -> list[ChildReport]:
        """Reports that have arrived, possibly none. Raises ChildGone at end of file, ControlError."""
        return [decode_for_supervisor(line) for line in self._stream.read(wait=False)]

    def close(self) -> None:
        self._stream.sock.close()


def _command(message: Launch | SupervisorCommand) -> SupervisorCommand:
    if isinstance(message, Launch):
        raise ControlError("a second Launch")
    return message


class _Stream:
    """Messages over a socket. Raises ``gone`` at end of file and when the peer has closed."""

    def __init__(self, sock: socket.socket, gone: type[ChannelClosed]) -> None:
        sock.setblocking(True)
        self.sock = sock
        self._gone = gone
        self._lines = LineBuffer()
        self._write_lock = threading.Lock()

    def read(self, *, wait: bool) -> list[bytes]:
        """Complete lines that have arrived. ``wait``: block until the first read returns data."""
        lines: list[bytes] = []
        while True:
            try:
                data = self.sock.recv(_READ_BYTES, 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return lines
            except ConnectionResetError:
                data = b""  # the peer closed with unread data
            if not data:
                if lines:
                    return lines  # the next read sees the end of file again
                raise self._gone("the other end of the control channel is closed")
            lines += self._lines.feed(data)
            wait = False

    def write(self, message: Any) -> None:
        """Blocks while the socket's buffer is full."""
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
