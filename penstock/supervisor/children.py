"""The fleet's children: what is known of each, and what is to be done with them."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from penstock.supervisor.actions import Action, Kill, Name, Say, Send, Spawn
from penstock.supervisor.restart import RestartPolicy
from penstock.wire.control import Failed, Info, Order, Role

GRACE_S = 5.0
"""Seconds a child has to exit after Stop, or after it reported that it failed, before it is killed."""


class State(enum.Enum):
    """Of one child."""

    WAITING = enum.auto()
    STARTING = enum.auto()
    READY = enum.auto()
    RETIRING = enum.auto()
    GONE = enum.auto()


@dataclass(slots=True)
class Child:
    name: Name
    state: State = State.GONE
    epoch: int = -1
    # Starts after its deaths.
    restarts: int = -1
    # WAITING: its start; otherwise when it is killed, for being late with its start, its beat or its exit.
    deadline: float | None = None
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    info: Info = field(default_factory=dict)
    last_progress: str | None = None
    # Why it ends: what it said itself, or why it is killed. Told when it is dead.
    failure: Failed | None = None
    # It said that it fails, or closed its channel: its death is due.
    leaving: bool = False
    killed: bool = False
    # Killed because another engine of its group died.
    felled: bool = False
    # The child whose work it takes over once it is ready.
    replaces: Name | None = None

    @property
    def alive(self) -> bool:
        """There is a process, or one has been ordered."""
        return self.state in (State.STARTING, State.READY, State.RETIRING)


class Children:
    """All children, in the order of their first starts, and the actions that wait to be taken."""

    def __init__(self, names: Iterable[Name], startup_timeout: float) -> None:
        self._children = {name: Child(name) for name in names}
        self._startup_timeout = startup_timeout
        # Processes started so far in each place: a number that is used again never repeats an epoch.
        self._starts: Counter[Name] = Counter()
        self._actions: list[Action] = []

    def __iter__(self) -> Iterator[Child]:
        return iter(self._children.values())

    def __getitem__(self, name: Name) -> Child:
        return self._children[name]

    def __contains__(self, name: Name) -> bool:
        return name in self._children

    def names(self) -> list[Name]:
        return list(self._children)

    def alive(self) -> list[Child]:
        return [child for child in self if child.alive]

    def of(self, role: Role, *states: State) -> list[Child]:
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
        child.state = State.STARTING
        child.failure, child.last_progress = None, None
        child.leaving = child.killed = child.felled = False
        child.deadline = now + self._startup_timeout
        self.act(Spawn(child.name, child.epoch))

    def kill(self, child: Child) -> None:
        child.deadline, child.killed = None, True
        self.act(Kill(child.name))

    def send(self, child: Child, order: Order) -> None:
        self.act(Send(child.name, order))

    def say(self, level: int, text: str) -> None:
        """A line for the log, of one of :mod:`logging`'s levels."""
        self.act(Say(level, text))

    def act(self, action: Action) -> None:
        self._actions.append(action)

    def take(self) -> list[Action]:
        """The actions since the last call."""
        actions, self._actions = self._actions, []
        return actions
