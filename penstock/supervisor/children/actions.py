"""What the process manager tells the supervisor's event loop to do."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.wire.control import Progress, Role, SupervisorCommand


@dataclass(frozen=True, slots=True)
class ProcessName:
    """Role and number of a child, whichever process runs under it."""

    role: Role
    index: int

    def __str__(self) -> str:
        return f"{self.role} {self.index}"


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a process."""

    name: ProcessName
    epoch: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message on the control channel."""

    name: ProcessName
    command: SupervisorCommand


@dataclass(frozen=True, slots=True)
class Kill:
    """Send SIGKILL. The exit is reported to the process manager like any other."""

    name: ProcessName


@dataclass(frozen=True, slots=True)
class ShowProgress:
    """Show the progress of a start."""

    name: ProcessName
    progress: Progress


@dataclass(frozen=True, slots=True)
class WriteLog:
    """Write a log line; ``level`` is one of :mod:`logging`'s. With a ``subject``, one line a minute about it,
    because a child or a sender of signals can cause more at any rate."""

    level: int
    text: str
    subject: str | None = None


@dataclass(frozen=True, slots=True)
class AnnounceReady:
    """Print the banner: every child is ready for the first time."""


@dataclass(frozen=True, slots=True)
class NothingReplaced:
    """Forget what a rolling restart was to bring: its first replacement has failed."""


@dataclass(frozen=True, slots=True)
class ReplaceAgain:
    """Start a rolling restart: SIGHUP came during the one that has ended."""


Action = Spawn | Send | Kill | ShowProgress | WriteLog | AnnounceReady | NothingReplaced | ReplaceAgain
