"""The fleet's children: what is known of each, and what is to be done with them."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from penstock.supervisor.children.actions import Action, Kill, ProcessName, Send, Spawn, WriteLog
from penstock.supervisor.children.restart_policy import RestartPolicy
from penstock.wire.control import Info, ProcessFailed, Role, SupervisorCommand

EXIT_GRACE_S = 5.0
"""Seconds a child has to exit after Stop, or after it reported that it failed, before it is killed."""


class ChildState(enum.Enum):
    """Of one child."""

    WAITING = enum.auto()
    STARTING = enum.auto()
    READY = enum.auto()
    RETIRING = enum.auto()
    GONE = enum.auto()


@dataclass(slots=True)
class Child:
    name: ProcessName
    state: ChildState = ChildState.GONE
    epoch: int = -1
    # Starts after its deaths.
    restarts: int = -1
    # WAITING: its start; otherwise when it is killed, for being late with its start, its beat or its exit.
    deadline: float | None = None
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    info: Info = field(default_factory=dict)
    last_progress: str | None = None
    # Why it ends: what it said itself, or why it is killed. Told when it is dead.
    failure: ProcessFailed | None = None
    # It said that it fails, or closed its channel: its death is due.
    exiting: bool = False
    killed: bool = False
    # Killed because another engine of its group died.
    killed_with_group: bool = False
    # The child whose work it takes over once it is ready.
    replaces: ProcessName | None = None

    @property
    def alive(self) -> bool:
        """There is a process, or one has been ordered."""
        return self.state in (ChildState.STARTING, ChildState.READY, ChildState.RETIRING)


class ChildTable:
    """All children, in the order of their first starts, and the actions that wait to be taken."""

    def __init__(self, names: Iterable[ProcessName], startup_timeout: float) -> None:
        self._children = {name: Child(name) for name in names}
        self._startup_timeout = startup_timeout
        # Processes started so far in each place: a number that is used again never repeats an epoch.
        self._starts: Counter[ProcessName] = Counter()
        self._actions: list[Action] = []

    def __iter__(self) -> Iterator[Child]:
        return iter(self._children.values())

    def __getitem__(self, name: ProcessName) -> Child:
        return self._children[name]

    def __contains__(self, name: ProcessName) -> bool:
        return name in self._children

    def names(self) -> list[ProcessName]:
        return list(self._children)

    def alive(self) -> list[Child]:
        return [child for child in self if child.alive]

    def with_role(self, role: Role, *states: ChildState) -> list[Child]:
        """Those of a role that are in one of these states."""
        return [child for child in self if child.name.role == role and child.state in states]

    def add(self, child: Child) -> None:
        self._children[child.name] = child

    def remove(self, child: Child) -> None:
        del self._children[child.name]

    # -- what is to be done ------------------------------------------------------------------------

    def spawn(self, child: Child, now: float) -> None:
        child.epoch = self._starts[child.name]
        self._starts[child.name] += 1
        child.restarts += 1
        child.state = ChildState.STARTING
        child.failure, child.last_progress = None, None
        child.exiting = child.killed = child.killed_with_group = False
        child.deadline = now + self._startup_timeout
        self.add_action(Spawn(child.name, child.epoch))

    def kill(self, child: Child) -> None:
        child.deadline, child.killed = None, True
        self.add_action(Kill(child.name))

    def send(self, child: Child, order: SupervisorCommand) -> None:
        self.add_action(Send(child.name, order))

    def log(self, level: int, text: str) -> None:
        """A line for the log, of one of :mod:`logging`'s levels."""
        self.add_action(WriteLog(level, text))

    def add_action(self, action: Action) -> None:
        self._actions.append(action)

    def take_actions(self) -> list[Action]:
        """The actions since the last call."""
        actions, self._actions = self._actions, []
        return actions
