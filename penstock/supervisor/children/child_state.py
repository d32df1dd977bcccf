"""State of each child process: what may follow what, and the table of all children."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from penstock.supervisor.children.actions import Action, Kill, ProcessName, Send, Spawn, WriteLog
from penstock.supervisor.children.restart_policy import RestartPolicy
from penstock.wire.control import SERVER_ROLES, Info, ProcessFailed, Role, SupervisorCommand

EXIT_GRACE_S = 5.0
"""Seconds a child has to exit after Stop, or after it reported a failure, before it is killed."""


class ChildState(enum.Enum):
    GONE = enum.auto()
    """No process, and no start is planned."""
    WAITING = enum.auto()
    """No process until its restart is due."""
    STARTING = enum.auto()
    READY = enum.auto()
    RETIRING = enum.auto()
    """A replaced server that finishes its requests."""


class ChildEvent(enum.Enum):
    SPAWN = enum.auto()
    READY = enum.auto()
    RETIRE = enum.auto()
    EXIT = enum.auto()
    SCHEDULE_RESTART = enum.auto()
    CANCEL_RESTART = enum.auto()


TRANSITIONS: dict[ChildState, dict[ChildEvent, ChildState]] = {
    ChildState.GONE: {
        ChildEvent.SPAWN: ChildState.STARTING,
        ChildEvent.SCHEDULE_RESTART: ChildState.WAITING,
    },
    ChildState.WAITING: {
        ChildEvent.SPAWN: ChildState.STARTING,
        ChildEvent.CANCEL_RESTART: ChildState.GONE,
    },
    ChildState.STARTING: {
        ChildEvent.READY: ChildState.READY,
        ChildEvent.EXIT: ChildState.GONE,
    },
    ChildState.READY: {
        ChildEvent.RETIRE: ChildState.RETIRING,
        ChildEvent.EXIT: ChildState.GONE,
    },
    ChildState.RETIRING: {
        ChildEvent.EXIT: ChildState.GONE,
    },
}
"""State → event → next state. Everything else raises :class:`IllegalChildTransitionError`."""

_ALIVE = (ChildState.STARTING, ChildState.READY, ChildState.RETIRING)


class IllegalChildTransitionError(Exception):
    """An event that :data:`TRANSITIONS` does not allow in the child's state."""


class ExitCause(enum.Enum):
    """Why a living child is about to exit."""

    NONE = enum.auto()
    OWN = enum.auto()
    """The child reported a failure or closed its control channel."""
    KILLED = enum.auto()
    KILLED_WITH_GROUP = enum.auto()
    """Killed because another engine of its group exited."""


@dataclass(slots=True)
class Child:
    """One child. Its methods are the only way to change its state."""

    name: ProcessName
    replaces: ProcessName | None = None
    """The child whose work it takes over once it is ready."""
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    epoch: int = -1
    restarts: int = -1
    """Starts after an exit that nobody asked for."""
    deadline: float | None = None
    """WAITING: when it is started. Otherwise when it is killed: for a late start, heartbeat or exit."""
    info: Info = field(default_factory=dict)
    last_progress: str | None = None
    failure: ProcessFailed | None = None
    """The child's own report, or why it is killed. Logged when it has exited."""
    exit_cause: ExitCause = ExitCause.NONE
    started: bool = True
    """False after a start for which the system had no process, memory or descriptor."""
    _state: ChildState = ChildState.GONE

    @property
    def state(self) -> ChildState:
        return self._state

    @property
    def alive(self) -> bool:
        """Whether the child has a process, or one has been ordered."""
        return self._state in _ALIVE

    @property
    def exiting(self) -> bool:
        """The child's exit is due: it no longer has to become ready or to send heartbeats."""
        return self.exit_cause is not ExitCause.NONE

    @property
    def killed(self) -> bool:
        return self.exit_cause in (ExitCause.KILLED, ExitCause.KILLED_WITH_GROUP)

    # -- transitions; each raises IllegalTransitionError -------------------------------------------

    def spawn(self, epoch: int, deadline: float) -> None:
        """The child's process is ordered, and has to be ready by ``deadline``."""
        self._apply(ChildEvent.SPAWN)
        self.epoch, self.deadline = epoch, deadline
        self.restarts += 1
        self.failure, self.last_progress = None, None
        self.exit_cause = ExitCause.NONE
        self.started = True

    def ready(self, info: Info) -> None:
        self._apply(ChildEvent.READY)
        self.deadline, self.info = None, info

    def retire(self) -> None:
        self._apply(ChildEvent.RETIRE)

    def exit(self) -> None:
        self._apply(ChildEvent.EXIT)
        self.deadline = None

    def schedule_restart(self, at: float) -> None:
        self._apply(ChildEvent.SCHEDULE_RESTART)
        self.deadline = at

    def cancel_restart(self) -> None:
        self._apply(ChildEvent.CANCEL_RESTART)
        self.deadline = None

    def _apply(self, event: ChildEvent) -> None:
        successor = TRANSITIONS[self._state].get(event)
        if successor is None:
            raise IllegalChildTransitionError(
                f"{self.name} is {self._state.name}, which excludes {event.name}"
            )
        self._state = successor

    # -- before an exit, in any state with a process -----------------------------------------------

    def expect_exit(self, deadline: float) -> None:
        """The child is about to exit by itself and is killed at ``deadline`` otherwise; nothing if it was
        killed."""
        if not self.killed:
            self.exit_cause, self.deadline = ExitCause.OWN, deadline

    def mark_killed(self, cause: ExitCause) -> None:
        """The first cause of a kill stays."""
        self.deadline = None
        if not self.killed:
            self.exit_cause = cause


class ChildTable:
    """All children, in the order of their first starts, and the actions that wait to be taken."""

    def __init__(self, names: Iterable[ProcessName], startup_timeout: float) -> None:
        self._children = {name: Child(name) for name in names}
        self._startup_timeout = startup_timeout
        self._starts: Counter[ProcessName] = Counter()
        """Processes started so far under each name: a number that is used again never repeats an epoch."""
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
        """Children of a role that are in one of these states."""
        return [child for child in self if child.name.role == role and child.state in states]

    def servers(self, *states: ChildState) -> list[Child]:
        """Children that have clients and are in one of these states."""
        return [child for role in SERVER_ROLES for child in self.with_role(role, *states)]

    def add(self, child: Child) -> None:
        self._children[child.name] = child

    def remove(self, child: Child) -> None:
        del self._children[child.name]

    # -- actions -----------------------------------------------------------------------------------

    def spawn(self, child: Child, now: float) -> None:
        """Start its process."""
        child.spawn(self._starts[child.name], now + self._startup_timeout)
        self._starts[child.name] += 1
        self.add_action(Spawn(child.name, child.epoch))

    def kill(self, child: Child, cause: ExitCause = ExitCause.KILLED) -> None:
        child.mark_killed(cause)
        self.add_action(Kill(child.name))

    def send(self, child: Child, command: SupervisorCommand) -> None:
        self.add_action(Send(child.name, command))

    def log(self, level: int, text: str) -> None:
        """A log line; ``level`` is one of :mod:`logging`'s."""
        self.add_action(WriteLog(level, text))

    def log_rarely(self, level: int, subject: str, text: str) -> None:
        """A log line, once a minute about ``subject``: what it tells can happen at any rate."""
        self.add_action(WriteLog(level, text, subject))

    def add_action(self, action: Action) -> None:
        self._actions.append(action)

    def take_actions(self) -> list[Action]:
        """The actions since the last call."""
        actions, self._actions = self._actions, []
        return actions


def join_names(children: Iterable[Child]) -> str:
    """``engine 0, engine 1``."""
    return ", ".join(str(child.name) for child in children)
