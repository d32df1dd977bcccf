"""What the fleet tells the supervisor's loop to do."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.wire.control import Order, Progress, Role


@dataclass(frozen=True, slots=True)
class Name:
    """One place in the fleet, whatever process fills it."""

    role: Role
    index: int

    def __str__(self) -> str:
        return f"{self.role} {self.index}"


@dataclass(frozen=True, slots=True)
class Spawn:
    name: Name
    epoch: int


@dataclass(frozen=True, slots=True)
class Send:
    name: Name
    order: Order


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL; the death is reported to the fleet like any other."""

    name: Name


@dataclass(frozen=True, slots=True)
class Show:
    """Progress of a start."""

    name: Name
    progress: Progress


@dataclass(frozen=True, slots=True)
class Say:
    """A line for the log; ``level`` is one of :mod:`logging`'s."""

    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Announce:
    """Every child is ready for the first time."""


Action = Spawn | Send | Kill | Show | Say | Announce
