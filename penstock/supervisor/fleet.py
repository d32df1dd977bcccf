"""What the supervisor decides: a state machine over its children, without processes, sockets or clocks.

It is fed events (a report, a death, a signal, the time) and answers each with the actions to take.

    STARTING ──all ready──► SERVING ──signal, gave up──► DRAINING ──streams done──► STOPPING ──► ENDED
        └───────────────────signal, gave up────────────────────────────────────────────►┘

While SERVING, API servers may be replaced one by one: a new one takes the next free number of the old one's
place, and when it is ready the old one is RETIRING, serving what it has until that ends.

Engines in lock-step stand and fall together: when one dies, the others are killed, and all are started again.
"""

import enum
import logging
import math
import signal
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from penstock.supervisor.actions import Action, Announce, Kill, Name, Say, Send, Show, Spawn
from penstock.supervisor.agreement import Register
from penstock.supervisor.exits import EXIT_FAILED, EXIT_FATAL, EXIT_OK, describe_exit, exit_code_of
from penstock.supervisor.restart import RestartPolicy
from penstock.wire.control import (
    Beat,
    Drain,
    DrainEngine,
    EnginesDraining,
    Failed,
    Info,
    Order,
    Progress,
    ProposeState,
    Ready,
    Report,
    Role,
    StatesAdopted,
    Stop,
)

GRACE_S = 5.0
"""Seconds a child has to exit after Stop, or after it reported that it failed, before it is killed."""

SAME_SIGNAL_S = 0.1
"""Signals closer together than this are one: what starts the supervisor may pass on a SIGINT that the
terminal has sent to the whole group already. A closed terminal sends several SIGHUP; they never hurry."""

LATE_S = 2.0
"""A supervisor that looks at an engine's silence this late was stopped or starved itself, and has not read
what the engine may have said meanwhile: it gives the engine its time once more."""


# -- state ---------------------------------------------------------------------------------------------


class Phase(enum.Enum):
    STARTING = enum.auto()
    SERVING = enum.auto()
    DRAINING = enum.auto()
    STOPPING = enum.auto()
    ENDED = enum.auto()


class State(enum.Enum):
    """Of one child."""

    WAITING = enum.auto()
    STARTING = enum.auto()
    READY = enum.auto()
    RETIRING = enum.auto()
    GONE = enum.auto()


@dataclass(slots=True)
class _Child:
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
        return self.state in (State.STARTING, State.READY, State.RETIRING)


class Fleet:
    """All children of one ``penstock serve``. Times are seconds of any monotonic clock."""

    def __init__(
        self,
        *,
        engines: int,
        api_servers: int,
        startup_timeout: float,
        drain_timeout: float,
        engine_hang_timeout: float,
        coordinator: bool = False,
        lockstep: bool = False,
        first_rank: int = 0,
        all_engines: int | None = None,
    ) -> None:
        """``engines`` are those to start here, from ``first_rank`` on, of ``all_engines`` on all hosts (None:
        there are no others). ``engine_hang_timeout`` 0: engines may be silent for any time. ``coordinator``:
        there is one. ``lockstep``: engines run in lock-step. Without API servers, as on a host that runs
        engines for those of another, engines are drained instead."""
        names = [Name("coordinator", 0)] if coordinator else []
        names += [Name("engine", first_rank + index) for index in range(engines)]
        names += [Name("api-server", index) for index in range(api_servers)]
        self._children = {name: _Child(name) for name in names}
        # Engines in lock-step, which share a policy; none otherwise.
        self._group = [child for child in self._children.values() if lockstep and child.name.role == "engine"]
        for child in self._group:
            child.policy = self._group[0].policy
        # Processes started so far in each place: a number that is used again never repeats an epoch.
        self._starts: Counter[Name] = Counter()
        self._to_replace: deque[Name] = deque()
        # An API server's number modulo this is its place, which it keeps when it is replaced.
        self._places = api_servers
        # Those that have streams to finish at the end.
        self._drained: Role = "api-server" if api_servers else "engine"
        self._all_engines = engines if all_engines is None else all_engines
        # Ranks of the engines that get no new streams.
        self._draining: set[int] = set()
        self._register = Register()
        self._startup_timeout = startup_timeout
        self._drain_timeout = drain_timeout
        self._engine_hang_timeout = engine_hang_timeout
        self._phase = Phase.STARTING
        self._signalled_at = -math.inf
        self._exit_code = EXIT_OK
        # End of DRAINING or STOPPING.
        self._deadline: float | None = None
        self._actions: list[Action] = []

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def exit_code(self) -> int | None:
        """None until every child is gone for good."""
        return self._exit_code if self._phase is Phase.ENDED else None

    def names(self) -> list[Name]:
        """The coordinator, if there is one, then engines, then API servers."""
        return list(self._children)

    def info(self, name: Name) -> Info:
        """What the child said of itself when it became ready."""
        return self._children[name].info

    def restarts(self, name: Name) -> int:
        """How often the child was started again after it had died."""
        return self._children[name].restarts

    def next_deadline(self) -> float | None:
        """When :meth:`tick` has something to do."""
        deadlines = [child.deadline for child in self._children.values()] + [self._deadline]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    # -- events, each returns what is to be done ---------------------------------------------------

    def begin(self, now: float) -> list[Action]:
        """Starts everybody: API servers at once after the others, as they connect later."""
        for child in self._children.values():
            self._spawn(child, now)
        return self._take()

    def report(self, name: Name, report: Report, now: float) -> list[Action]:
        """A message from a child that lives."""
        child = self._children[name]
        match report:
            case Progress():
                child.last_progress = report.text
                if child.state is State.STARTING and not child.leaving:
                    child.deadline = now + self._startup_timeout
                self._actions.append(Show(name, report))
            case Ready():
                self._ready(child, report, now)
            case Beat():
                self._hears(child, now)
            case DrainEngine():
                self._drain_engine(child, report)
            case ProposeState():
                self._propose(child, report)
            case StatesAdopted():
                self._register.confirm(name, report.revision)
                self._adopt()
            case Failed():
                self._fails(child, report, now)
        return self._take()

    def misbehaved(self, name: Name, message: str, now: float) -> list[Action]:
        """The child broke the control channel's rules; it is killed."""
        child = self._children[name]
        self._fails(child, Failed(message=message, fatal=False), now)
        self._kill(child)
        return self._take()

    def hung_up(self, name: Name, now: float) -> list[Action]:
        """The child closed its end of the control channel: its death follows, or is helped along."""
        child = self._children[name]
        if not child.leaving:
            child.leaving, child.deadline = True, now + GRACE_S
        return self._take()

    def could_not_start(self, name: Name, message: str, now: float) -> list[Action]:
        """There is no process: the machine refused it."""
        child = self._children[name]
        child.failure = Failed(message=message, fatal=False)
        self._gone(child, "could not be started", now)
        return self._take()

    def died(self, name: Name, returncode: int, now: float) -> list[Action]:
        """The process is gone; ``returncode`` is negative for a signal, as subprocess gives it."""
        child = self._children[name]
        if returncode == EXIT_FATAL and child.failure is None:
            child.failure = Failed(message="it would fail the same way again", fatal=True)
        orderly = child.killed or returncode == EXIT_OK
        self._gone(child, describe_exit(returncode), now, orderly=orderly)
        return self._take()

    def signalled(self, signum: int, now: float) -> list[Action]:
        """SIGINT, SIGTERM, or SIGHUP of a closed terminal.

        The first one drains; the next one ends the running streams with an error, one more kills.
        """
        name = signal.Signals(signum).name
        if self._phase in (Phase.STARTING, Phase.SERVING):
            draining = self._phase is Phase.SERVING
            wait = f", finishing running streams for up to {self._drain_timeout:g} s" if draining else ""
            self._say(logging.INFO, f"{name}: shutting down{wait}")
            self._signalled_at = now
            self._wind_down(EXIT_OK, now)
        elif signum != signal.SIGHUP and now - self._signalled_at >= SAME_SIGNAL_S:
            self._signalled_at = now
            self._exit_code = self._exit_code or exit_code_of(signum)
            if self._phase is Phase.DRAINING:
                self._say(logging.WARNING, f"{name} while shutting down: running streams end with an error")
                self._stop(now)
            else:
                self._say(logging.WARNING, f"{name} while stopping: killing what has not ended")
                self._kill_all()
        self._advance(now)
        return self._take()

    def replace(self, now: float) -> list[Action]:
        """SIGHUP: new API servers take the place of those that serve, one after the other."""
        if self._phase is not Phase.SERVING or self._replacing():
            doing = "replacing API servers" if self._replacing() else self._phase.name.lower()
            self._say(logging.WARNING, f"SIGHUP while {doing}: passed over")
            return self._take()
        self._to_replace += [
            name
            for name, child in self._children.items()
            if name.role == "api-server" and child.state is State.READY
        ]
        self._say(logging.INFO, f"SIGHUP: replacing {len(self._to_replace)} API servers one by one")
        self._replace_next(now)
        return self._take()

    def tick(self, now: float) -> list[Action]:
        """Does what is due."""
        for child in self._children.values():
            if child.deadline is not None and child.deadline <= now:
                overdue, child.deadline = now - child.deadline, None
                self._due(child, now, overdue)
        if self._deadline is not None and self._deadline <= now:
            self._deadline = None
            if self._phase is Phase.DRAINING:
                waited = f"{self._drain_timeout:g} s (--drain-timeout)"
                self._say(logging.WARNING, f"streams still run after {waited}; they end with an error")
                self._stop(now)
            else:
                self._say(
                    logging.WARNING, f"killing what has not ended: {', '.join(map(str, self._alive()))}"
                )
                self._kill_all()
        return self._take()

    # -- one child ---------------------------------------------------------------------------------

    def _spawn(self, child: _Child, now: float) -> None:
        child.epoch = self._starts[child.name]
        self._starts[child.name] += 1
        child.restarts += 1
        child.state = State.STARTING
        child.failure, child.last_progress = None, None
        child.leaving = child.killed = child.felled = False
        child.deadline = now + self._startup_timeout
        self._actions.append(Spawn(child.name, child.epoch))

    def _ready(self, child: _Child, report: Ready, now: float) -> None:
        if child.state is not State.STARTING or child.leaving:
            self._say(logging.DEBUG, f"{child.name} reported ready out of turn")
            return
        child.state, child.deadline, child.info = State.READY, None, report.info
        if child not in self._group or all(other.state is State.READY for other in self._group):
            child.policy.ready(now)
        self._hears(child, now)
        if self._draining and child.name.role == "api-server":
            self._actions.append(Send(child.name, EnginesDraining(ranks=sorted(self._draining))))
        if self._register.agreed.revision and child.name.role == "api-server":
            self._actions.append(Send(child.name, self._register.agreed))
        if child.replaces is not None:
            self._take_over(child, now)
        elif self._phase is Phase.SERVING:
            self._say(logging.INFO, f"{child.name} is ready again")
        elif self._phase is Phase.STARTING:
            self._actions.append(Show(child.name, Progress(text="ready", fraction=1.0)))
            if all(other.state is State.READY for other in self._children.values()):
                self._phase = Phase.SERVING
                self._actions.append(Announce())

    def _hears(self, child: _Child, now: float) -> None:
        """An engine that is ready must be heard again in time."""
        beats = child.name.role == "engine" and child.state is State.READY and not child.leaving
        if beats and self._engine_hang_timeout:
            child.deadline = now + self._engine_hang_timeout

    def _drain_engine(self, child: _Child, report: DrainEngine) -> None:
        """Tells every API server; those that start are told when they are ready."""
        if report.rank >= self._all_engines:
            self._say(logging.ERROR, f"{child.name} asked for engine {report.rank}, which there is not")
            return
        change = self._draining.add if report.draining else self._draining.discard
        change(report.rank)
        self._say(
            logging.INFO,
            f"engine {report.rank} gets new streams {'no longer' if report.draining else 'again'}",
        )
        self._tell_api_servers(EnginesDraining(ranks=sorted(self._draining)))

    def _propose(self, child: _Child, change: ProposeState) -> None:
        """Decides a change that all engines have prepared; one that comes too late is told what is agreed."""
        if self._register.propose(change):
            self._say(logging.INFO, f"agreed: {change.name} {change.arguments}")
            self._tell_api_servers(self._register.agreed)
        else:
            self._actions.append(Send(child.name, self._register.agreed))

    def _adopt(self) -> None:
        if self._register.adopt(self._serving()):
            self._tell_api_servers(self._register.agreed)

    def _serving(self) -> list[Name]:
        """API servers that may have clients; those that start are told everything when they are ready."""
        return [
            name
            for name, child in self._children.items()
            if name.role == "api-server" and child.state in (State.READY, State.RETIRING)
        ]

    def _tell_api_servers(self, order: Order) -> None:
        self._actions += [Send(name, order) for name in self._serving()]

    def _fails(self, child: _Child, failure: Failed, now: float) -> None:
        child.failure = child.failure or failure
        child.leaving, child.deadline = True, now + GRACE_S

    def _due(self, child: _Child, now: float, overdue: float) -> None:
        """The child's deadline has passed, ``overdue`` seconds ago."""
        if child.state is State.WAITING:
            self._spawn(child, now)
            return
        if child.state is State.STARTING and not child.leaving:
            last = f"; it was at: {child.last_progress}" if child.last_progress else ""
            child.failure = Failed(
                message=f"not ready within {self._startup_timeout:g} s (--startup-timeout){last}",
                # What never worked is too slow for its timeout, and would be again.
                fatal=child.epoch == 0,
            )
        elif child.state is State.READY and not child.leaving:
            if overdue > LATE_S:
                self._hears(child, now)
                return
            child.failure = Failed(
                message=f"not heard of for {self._engine_hang_timeout:g} s (--engine-hang-timeout)",
                fatal=False,
            )
        self._kill(child)

    def _gone(self, child: _Child, cause: str, now: float, *, orderly: bool = False) -> None:
        """Tells the death once, with its cause, and settles what follows."""
        ending = self._phase in (Phase.DRAINING, Phase.STOPPING)
        retired = child.state is State.RETIRING
        child.state, child.deadline = State.GONE, None
        self._register.forget(child.name)
        self._adopt()
        reason = f": {child.failure.message}" if child.failure else ""
        if child in self._group and not ending:
            self._gone_in_group(child, f"{cause}{reason}", now)
        elif ending:
            if not orderly:
                self._say(logging.WARNING, f"{child.name} {cause} while shutting down{reason}")
        elif retired:
            del self._children[child.name]
            told = "has served all it had" if orderly else f"{cause} before it had served all it had{reason}"
            self._say(logging.INFO if orderly else logging.WARNING, f"{child.name} {told}")
        else:
            self._say(logging.ERROR, f"{child.name} {cause}{reason}")
            if not self._gone_in_replacement(child, now):
                self._restart_or_give_up([child], now)
        self._advance(now)

    def _gone_in_group(self, child: _Child, cause: str, now: float) -> None:
        """Ends the engines in lock-step with one that died, then settles what follows for all of them."""
        left = [other for other in self._group if other.alive]
        if not child.felled:
            self._say(logging.ERROR, f"{child.name} {cause}")
            fellows = [other for other in left if not other.killed]
            if fellows:
                self._say(logging.INFO, f"killing what runs in lock-step with it: {_listed(fellows)}")
            for other in fellows:
                other.felled = True
                self._kill(other)
        if not left:
            self._restart_or_give_up(self._group, now)

    def _restart_or_give_up(self, gone: list[_Child], now: float) -> None:
        """Of one child, or of all engines in lock-step."""
        # what a killed one complained of last was that the others had left
        fatal = any(child.failure is not None and child.failure.fatal and not child.felled for child in gone)
        delay = None if fatal else gone[0].policy.died(now)
        name, role = _listed(gone), gone[0].name.role
        if len(gone) > 1:
            name = f"the group of {name}"
        if delay is not None:
            self._say(logging.INFO, f"{name} is started again in {delay:g} s")
            for child in gone:
                child.state, child.deadline = State.WAITING, now + delay
            return
        if not fatal:
            self._say(logging.ERROR, f"{name} keeps failing to start; giving up")
        others = [
            str(other.name)
            for other in self._children.values()
            if other.name.role == role and other.state in (State.WAITING, State.STARTING, State.READY)
        ]
        if self._phase is Phase.SERVING and (others or role == "coordinator"):
            rest = f", with {', '.join(others)}" if others else ""
            self._say(logging.ERROR, f"serving goes on without {name}{rest}")
        else:
            self._wind_down(EXIT_FAILED, now)

    # -- replacing API servers ---------------------------------------------------------------------

    def _replacing(self) -> bool:
        return any(child.replaces is not None for child in self._children.values())

    def _replace_next(self, now: float) -> None:
        while self._to_replace:
            old = self._to_replace.popleft()
            if self._children[old].state is not State.READY:
                continue  # it died meanwhile: the one that is started again is new anyway
            numbers = (Name("api-server", index) for index in count(old.index % self._places, self._places))
            child = _Child(next(name for name in numbers if name not in self._children), replaces=old)
            self._children[child.name] = child
            self._spawn(child, now)
            return

    def _take_over(self, child: _Child, now: float) -> None:
        """The new one is ready: the old one ends when it has served what it has."""
        assert child.replaces is not None
        old, child.replaces = self._children[child.replaces], None
        old.state, old.deadline = State.RETIRING, None
        self._actions.append(Send(old.name, Drain(replaced=True)))
        self._say(logging.INFO, f"{child.name} is ready and replaces {old.name}")
        self._replace_next(now)

    def _gone_in_replacement(self, child: _Child, now: float) -> bool:
        """Settles the death of either half of a replacement; False when it was none."""
        if child.replaces is not None:
            self._say(logging.ERROR, f"{child.replaces} goes on; nothing more is replaced")
            del self._children[child.name]
            self._to_replace.clear()
            return True
        for new in self._children.values():
            if new.replaces == child.name:  # it comes just in time
                new.replaces = None
                del self._children[child.name]
                self._replace_next(now)
                return True
        return False

    # -- the end -----------------------------------------------------------------------------------

    def _wind_down(self, exit_code: int, now: float) -> None:
        self._exit_code = exit_code
        for child in self._children.values():
            if child.state is State.WAITING:
                child.state, child.deadline = State.GONE, None
        if self._phase is Phase.STARTING:
            self._stop(now)
            return
        self._phase, self._deadline = Phase.DRAINING, now + self._drain_timeout
        for child in self._children.values():
            if child.state is State.STARTING:
                self._kill(child)
            elif child.alive and child.name.role == self._drained:
                self._actions.append(Send(child.name, Drain()))

    def _stop(self, now: float) -> None:
        self._phase, self._deadline = Phase.STOPPING, now + GRACE_S
        for child in self._children.values():
            if child.state is State.STARTING:
                self._kill(child)  # it has nothing to finish, and does not listen while it loads
            elif child.alive:
                self._actions.append(Send(child.name, Stop()))

    def _advance(self, now: float) -> None:
        """To the next phase, when the last child that this one waits for is gone."""
        alive = list(self._alive())
        if self._phase is Phase.DRAINING and not any(name.role == self._drained for name in alive):
            self._stop(now)
        if self._phase is Phase.STOPPING and not alive:
            self._phase, self._deadline = Phase.ENDED, None

    def _kill_all(self) -> None:
        for name in self._alive():
            self._kill(self._children[name])

    def _kill(self, child: _Child) -> None:
        child.deadline, child.killed = None, True
        self._actions.append(Kill(child.name))

    def _alive(self) -> Iterator[Name]:
        return (name for name, child in self._children.items() if child.alive)

    def _say(self, level: int, text: str) -> None:
        self._actions.append(Say(level, text))

    def _take(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions


def _listed(children: list[_Child]) -> str:
    return ", ".join(str(child.name) for child in children)
