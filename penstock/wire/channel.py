"""The control channel's two ends: messages of :mod:`penstock.wire.control` over a Unix socket pair.

Neither end waits for the other: a process that is stopped, hangs or sends without end costs its peer no more
than an :class:`Outbox` and the bytes of one read per turn.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Hashable

from penstock.wire.control import (
    MAX_FAILURE_CHARACTERS,
    AnyLaunch,
    ChangeState,
    ChildReport,
    ControlError,
    DrainEngine,
    GatewayLaunch,
    Heartbeat,
    Info,
    Launch,
    LineBuffer,
    ProcessFailed,
    Progress,
    Ready,
    SupervisorCommand,
    decode_for_child,
    decode_for_supervisor,
    encode,
)

LAST_WORD_TIMEOUT_S = 5.0
"""How long a child that fails waits for its supervisor to take the reason."""
# Bytes per read; one read rarely returns more than one message.
_READ_BYTES = 1 << 16

Message = AnyLaunch | SupervisorCommand | ChildReport


class ChannelClosed(ConnectionError):
    """The other end of a control channel is closed."""


class SupervisorGone(ChannelClosed):
    """The supervisor closed its end or died: this process exits at once, without draining."""


class ChildGone(ChannelClosed):
    """The child closed its end or died: its exit status follows."""


class ControlChannel:
    """The child's end.

    Owns the descriptor it is given. Reports may be sent from any thread, and none waits for the supervisor:
    one that finds no room is sent with the next, a heartbeat at the latest. Every method raises
    :class:`SupervisorGone` when the supervisor is gone.
    """

    def __init__(self, fd: int) -> None:
        self._stream = _Stream(socket.socket(fileno=fd), SupervisorGone)
        self._launch: AnyLaunch | None = None
        self._reported_ready = False
        self._commands: list[SupervisorCommand] = []

    @property
    def launch(self) -> Launch:
        """The launch of an API server, an engine or a coordinator, see :attr:`any_launch`."""
        if not isinstance(self.any_launch, Launch):
            raise ControlError(f"expected Launch, got {type(self._launch).__name__}")
        return self.any_launch

    @property
    def gateway_launch(self) -> GatewayLaunch:
        """The launch of a gateway's worker, see :attr:`any_launch`."""
        if not isinstance(self.any_launch, GatewayLaunch):
            raise ControlError(f"expected GatewayLaunch, got {type(self._launch).__name__}")
        return self.any_launch

    @property
    def any_launch(self) -> AnyLaunch:
        """The first message; the first access waits for it. Raises ControlError if another message comes."""
        while self._launch is None:
            self._stream.wait(select.POLLIN)
            for line in self._stream.read():
                message = decode_for_child(line)
                if self._launch is None:
                    if not isinstance(message, Launch | GatewayLaunch):
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
        """Commands of one read, possibly none, without waiting.

        Raises SupervisorGone at end of file, after all commands before it were returned.
        """
        commands, self._commands = self._commands, []
        try:
            commands += [_command(decode_for_child(line)) for line in self._stream.read()]
        except SupervisorGone:
            if not commands:
                raise
        return commands

    @property
    def unsent(self) -> bool:
        """Whether reports wait for room in the socket; the next report, or :meth:`flush`, sends them."""
        return self._stream.unsent

    def flush(self) -> None:
        """Send what there is room for. Raises SupervisorGone."""
        self._stream.flush()

    def progress(self, text: str, fraction: float | None = None) -> None:
        """Report startup progress; ``fraction`` is 0 to 1."""
        self._stream.send(Progress(text=text, fraction=fraction))

    def ready(self, info: Info | None = None) -> None:
        """Reports that the process serves."""
        self._stream.send(Ready(info=info or {}))
        self._reported_ready = True

    def drain_engine(self, rank: int, draining: bool) -> None:
        """Ask that an engine stop getting new streams, or get them again."""
        self._stream.send(DrainEngine(rank=rank, draining=draining))

    def heartbeat(self) -> None:
        """Reports that the process's loop runs."""
        self._stream.send(Heartbeat())

    def failed(self, message: str, *, fatal: bool, usage: bool = False) -> None:
        """Report why the process exits; ``fatal``: a restart would fail the same way; ``usage``: the options
        cannot be run. Waits up to LAST_WORD_TIMEOUT_S until the report is sent."""
        self._stream.send(ProcessFailed(message=message[:MAX_FAILURE_CHARACTERS], fatal=fatal, usage=usage))
        deadline = time.monotonic() + LAST_WORD_TIMEOUT_S
        while self._stream.unsent and (left := deadline - time.monotonic()) > 0:
            self._stream.wait(select.POLLOUT, left)
            self._stream.flush()

    def forward(self, report: ChildReport) -> None:
        """Send a report that was made elsewhere: about states, or one of a process that this one proxies."""
        self._stream.send(report)

    def close(self) -> None:
        self._stream.sock.close()


class ChildChannel:
    """The supervisor's end of one child's channel. No method blocks."""

    def __init__(self, sock: socket.socket) -> None:
        self._stream = _Stream(sock, ChildGone)

    @classmethod
    def pair(cls) -> tuple[ChildChannel, socket.socket]:
        """The supervisor's end, and the child's socket, to be closed here once the child has started."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(ours), theirs

    def fileno(self) -> int:
        return self._stream.sock.fileno()

    def send(self, message: AnyLaunch | SupervisorCommand) -> None:
        """Send what the child has room for; the rest waits for :meth:`flush`. Raises ChildGone, and
        ControlError for a message too long."""
        self._stream.send(message)

    @property
    def unsent(self) -> bool:
        """Whether messages wait for room: call :meth:`flush` when the descriptor is writable."""
        return self._stream.unsent

    def flush(self) -> None:
        """Send messages that wait. Raises ChildGone."""
        self._stream.flush()

    def receive(self) -> list[ChildReport]:
        """Reports of one read, possibly none. Raises ChildGone at end of file, ControlError."""
        return [decode_for_supervisor(line) for line in self._stream.read()]

    def close(self) -> None:
        self._stream.sock.close()


def _command(message: AnyLaunch | SupervisorCommand) -> SupervisorCommand:
    if isinstance(message, Launch | GatewayLaunch):
        raise ControlError("a second Launch")
    return message


def subject(message: Message) -> Hashable:
    """What a message is about: it takes the place of an unsent one about the same."""
    match message:
        case DrainEngine():
            return DrainEngine, message.rank
        case ChangeState():  # of two with the same base, the supervisor would refuse one anyway
            return ChangeState, message.name
    return type(message)


class Outbox:
    """Messages that wait for room in a socket, at most one for each :func:`subject`.

    Every message replaces the older ones about its subject: states are sent as a whole, and what is ordered
    or reported twice is ordered or reported. So a peer that does not read costs a line for each subject.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, bytes] = {}
        self._started = b""
        """What is left of a line that was sent in part."""

    def __bool__(self) -> bool:
        return bool(self._started or self._waiting)

    def put(self, message: Message) -> None:
        """Raises ControlError for a message too long."""
        line = encode(message)
        self._waiting.pop(subject(message), None)
        self._waiting[subject(message)] = line

    def next_bytes(self) -> bytes:
        """What is to be sent next; the bytes of one line."""
        if not self._started and self._waiting:
            self._started = self._waiting.pop(next(iter(self._waiting)))
        return self._started

    def sent(self, count: int) -> None:
        """So many bytes of :meth:`next_bytes` are sent."""
        self._started = self._started[count:]


class _Stream:
    """Messages over a socket, without waiting. Raises ``gone`` at end of file and when the peer has
    closed."""

    def __init__(self, sock: socket.socket, gone: type[ChannelClosed]) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._gone = gone
        self._lines = LineBuffer()
        self._outbox = Outbox()
        self._lock = threading.Lock()

    def wait(self, event: int, timeout_s: float | None = None) -> None:
        """Wait for one of poll's events."""
        poll = select.poll()
        poll.register(self.sock, event)
        poll.poll(None if timeout_s is None else timeout_s * 1000)

    def read(self) -> list[bytes]:
        """The lines that one read completes, possibly none: what a peer sends without end waits in its own
        buffer meanwhile."""
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            data = b""  # the peer closed with unread data
        if not data:
            raise self._gone("the other end of the control channel is closed")
        return self._lines.feed(data)

    @property
    def unsent(self) -> bool:
        return bool(self._outbox)

    def send(self, message: Message) -> None:
        with self._lock:
            self._outbox.put(message)
        self.flush()

    def flush(self) -> None:
        """Send what there is room for."""
        try:
            with self._lock:
                while data := self._outbox.next_bytes():
                    self._outbox.sent(self.sock.send(data))
        except BlockingIOError:
            return
        except ConnectionError as error:
            raise self._gone(str(error)) from error
