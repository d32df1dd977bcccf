"""What the fleet tells the supervisor's loop to do."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.wire.control import Progress, Role, SupervisorCommand


@dataclass(frozen=True, slots=True)
class ProcessName:
    """One place in the fleet, whatever process fills it."""

    role: Role
    index: int

    def __str__(self) -> str:
        return f"{self.role} {self.index}"


@dataclass(frozen=True, slots=True)
class Spawn:
    name: ProcessName
    epoch: int


@dataclass(frozen=True, slots=True)
class Send:
    name: ProcessName
    order: SupervisorCommand


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL; the death is reported to the fleet like any other."""

    name: ProcessName


@dataclass(frozen=True, slots=True)
class ShowProgress:
    """Progress of a start."""

    name: ProcessName
    progress: Progress


@dataclass(frozen=True, slots=True)
class WriteLog:
    """A line for the log; ``level`` is one of :mod:`logging`'s."""

    level: int
    text: str


@dataclass(frozen=True, slots=True)
class AnnounceReady:
    """Every child is ready for the first time."""


Action = Spawn | Send | Kill | ShowProgress | WriteLog | AnnounceReady
