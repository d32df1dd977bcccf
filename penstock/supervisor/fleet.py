"""What the supervisor decides: a state machine over its children, without processes, sockets or clocks.

It is fed events (a report, a death, a signal, the time) and answers each with the actions to take. What the
events of one kind lead to stands in a file of its own: the way to the end (``phases``), new starts
(``recovery``), replaced API servers (``replacement``), what API servers are told (``notices``).
"""

from __future__ import annotations

import logging

from penstock.supervisor.actions import Action, Name, Show
from penstock.supervisor.children import GRACE_S, Child, Children, State
from penstock.supervisor.exits import EXIT_FATAL, EXIT_OK, describe_exit
from penstock.supervisor.notices import Notices
from penstock.supervisor.phases import Phase, Phases
from penstock.supervisor.recovery import Recovery, listed
from penstock.supervisor.replacement import Replacement
from penstock.wire.control import (
    Beat,
    DrainEngine,
    Failed,
    Info,
    Progress,
    ProposeState,
    Ready,
    Report,
    StatesAdopted,
)

LOOK_S = 1.0
"""How often to look at engines that must be heard, which speak as often."""
LATE_S = 2.0
"""A supervisor that looks this much later was stopped or starved itself, and perhaps its engines with it."""


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
        self._children = Children(names, startup_timeout)
        self._phases = Phases(self._children, "api-server" if api_servers else "engine", drain_timeout)
        self._recovery = Recovery(self._children, self._phases, lockstep=lockstep)
        self._replacement = Replacement(self._children, api_servers)
        self._notices = Notices(self._children, engines if all_engines is None else all_engines)
        self._startup_timeout = startup_timeout
        self._engine_hang_timeout = engine_hang_timeout
        self._looked_at = 0.0

    @property
    def phase(self) -> Phase:
        return self._phases.current

    @property
    def exit_code(self) -> int | None:
        """None until every child is gone for good."""
        return self._phases.exit_code

    def names(self) -> list[Name]:
        """The coordinator, if there is one, then engines, then API servers."""
        return self._children.names()

    def info(self, name: Name) -> Info:
        """What the child said of itself when it became ready."""
        return self._children[name].info

    def restarts(self, name: Name) -> int:
        """How often the child was started again after it had died."""
        return self._children[name].restarts

    def next_deadline(self) -> float | None:
        """When :meth:`tick` has something to do."""
        deadlines = [child.deadline for child in self._children] + [self._phases.deadline]
        if any(self._watched(child) for child in self._children):
            deadlines.append(self._looked_at + LOOK_S)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    # -- events, each returns what is to be done ---------------------------------------------------

    def begin(self, now: float) -> list[Action]:
        """Starts everybody: API servers at once after the others, as they connect later."""
        for child in self._children:
            self._children.spawn(child, now)
        return self._children.take()

    def report(self, name: Name, report: Report, now: float) -> list[Action]:
        """A message from a child that lives."""
        child = self._children[name]
        match report:
            case Progress():
                child.last_progress = report.text
                if child.state is State.STARTING and not child.leaving:
                    child.deadline = now + self._startup_timeout
                self._children.act(Show(name, report))
            case Ready():
                self._ready(child, report, now)
            case Beat():
                self._hears(child, now)
            case DrainEngine():
                self._notices.drain_engine(child, report)
            case ProposeState():
                self._notices.propose(child, report)
            case StatesAdopted():
                self._notices.adopted(name, report.revision)
            case Failed():
                self._fails(child, report, now)
        return self._children.take()

    def misbehaved(self, name: Name, message: str, now: float) -> list[Action]:
        """The child broke the control channel's rules; it is killed."""
        child = self._children[name]
        self._fails(child, Failed(message=message, fatal=False), now)
        self._children.kill(child)
        return self._children.take()

    def hung_up(self, name: Name, now: float) -> list[Action]:
        """The child closed its end of the control channel: its death follows, or is helped along."""
        child = self._children[name]
        if not child.leaving:
            child.leaving, child.deadline = True, now + GRACE_S
        return self._children.take()

    def could_not_start(self, name: Name, message: str, now: float) -> list[Action]:
        """There is no process: the machine refused it."""
        child = self._children[name]
        child.failure = Failed(message=message, fatal=False)
        self._gone(child, "could not be started", now)
        return self._children.take()

    def died(self, name: Name, returncode: int, now: float) -> list[Action]:
        """The process is gone; ``returncode`` is negative for a signal, as subprocess gives it."""
        child = self._children[name]
        if returncode == EXIT_FATAL and child.failure is None:
            child.failure = Failed(message="it would fail the same way again", fatal=True)
        orderly = child.killed or returncode == EXIT_OK
        self._gone(child, describe_exit(returncode, killed=child.killed), now, orderly=orderly)
        return self._children.take()

    def signalled(self, signum: int, now: float) -> list[Action]:
        """SIGINT, SIGTERM, or SIGHUP of a closed terminal.

        The first one drains; the next one ends the running streams with an error, one more kills.
        """
        self._phases.signalled(signum, now)
        return self._children.take()

    def replace(self, now: float) -> list[Action]:
        """SIGHUP: new API servers take the place of those that serve, one after the other."""
        if self.phase is not Phase.SERVING or self._replacement.running:
            doing = "replacing API servers" if self._replacement.running else self.phase.name.lower()
            self._children.say(logging.WARNING, f"SIGHUP while {doing}: passed over")
        else:
            self._replacement.begin(now)
        return self._children.take()

    def tick(self, now: float) -> list[Action]:
        """Does what is due."""
        self._look(now)
        for child in self._children:
            if child.deadline is not None and child.deadline <= now:
                child.deadline = None
                self._due(child, now)
        self._phases.tick(now)
        return self._children.take()

    # -- one child ---------------------------------------------------------------------------------

    def _ready(self, child: Child, report: Ready, now: float) -> None:
        if child.state is not State.STARTING or child.leaving:
            self._children.say(logging.DEBUG, f"{child.name} reported ready out of turn")
            return
        child.state, child.deadline, child.info = State.READY, None, report.info
        self._recovery.ready(child, now)
        self._hears(child, now)
        if child.name.role == "api-server":
            self._notices.tell(child)
        if child.replaces is not None:
            self._replacement.take_over(child, now)
        elif self.phase is Phase.SERVING:
            self._children.say(logging.INFO, f"{child.name} is ready again")
        elif self.phase is Phase.STARTING:
            self._children.act(Show(child.name, Progress(text="ready", fraction=1.0)))
            if all(other.state is State.READY for other in self._children):
                self._phases.serve()
        self._notices.appoint_speaker()

    def _watched(self, child: Child) -> bool:
        """An engine that is ready must be heard again in time."""
        engine = child.name.role == "engine" and self._engine_hang_timeout > 0
        return engine and child.state is State.READY and not child.leaving

    def _hears(self, child: Child, now: float) -> None:
        if self._watched(child):
            child.deadline = now + self._engine_hang_timeout

    def _look(self, now: float) -> None:
        """Time in which this process did not run counts as nobody's silence."""
        missed, self._looked_at = now - self._looked_at - LOOK_S, now
        if missed <= LATE_S:
            return
        for child in self._children:
            if self._watched(child) and child.deadline is not None:
                child.deadline = min(child.deadline + missed, now + self._engine_hang_timeout)

    def _fails(self, child: Child, failure: Failed, now: float) -> None:
        child.failure = child.failure or failure
        child.leaving, child.deadline = True, now + GRACE_S

    def _due(self, child: Child, now: float) -> None:
        """The child's deadline has passed."""
        if child.state is State.WAITING:
            self._children.spawn(child, now)
            return
        if child.state is State.STARTING and not child.leaving:
            last = f"; it was at: {child.last_progress}" if child.last_progress else ""
            child.failure = Failed(
                message=f"not ready within {self._startup_timeout:g} s (--startup-timeout){last}",
                # What never worked is too slow for its timeout, and would be again.
                fatal=child.epoch == 0,
            )
        elif child.state is State.READY and not child.leaving:
            fellows = self._recovery.fellows(child)
            if any(other.killed for other in fellows):  # it falls with that one
                self._hears(child, now)
                return
            child.failure = Failed(message=self._silence(fellows, now), fatal=False)
        self._children.kill(child)

    def _silence(self, fellows: list[Child], now: float) -> str:
        """What is to be said of a silent engine: those that compute in step with one that hangs wait for it
        within a step, and may have been heard of a little earlier or later."""
        told = f"not heard of for {self._engine_hang_timeout:g} s (--engine-hang-timeout)"
        soon = now + self._engine_hang_timeout / 2
        ready = [other for other in fellows if other.state is State.READY and not other.leaving]
        silent = [other for other in ready if other.deadline is not None and other.deadline < soon]
        if not silent:
            return told
        return f"{told}, and {listed(silent)} hardly less: one of them hangs, the others may wait for it"

    def _gone(self, child: Child, cause: str, now: float, *, orderly: bool = False) -> None:
        """Tells the death once, with its cause, and settles what follows."""
        retired = child.state is State.RETIRING
        child.state, child.deadline = State.GONE, None
        self._notices.forget(child.name)
        reason = f": {child.failure.message}" if child.failure else ""
        if self._phases.ending:
            if not orderly:
                self._children.say(logging.WARNING, f"{child.name} {cause} while shutting down{reason}")
        elif self._recovery.in_group(child):
            self._recovery.restart_group(child, f"{cause}{reason}", now)
        elif retired:
            self._children.remove(child)
            told = "has served all it had" if orderly else f"{cause} before it had served all it had{reason}"
            self._children.say(logging.INFO if orderly else logging.WARNING, f"{child.name} {told}")
        else:
            self._children.say(logging.ERROR, f"{child.name} {cause}{reason}")
            if not self._replacement.settle_death(child, now):
                self._recovery.restart_or_give_up([child], now)
        self._phases.advance(now)
