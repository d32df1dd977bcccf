"""What the supervisor decides: a state machine over its children, without processes, sockets or clocks.

It is fed events (a report, a death, a signal, the time) and answers each with the actions to take. What the
events of one kind lead to stands in a file of its own: the way to the end (``phases``), new starts
(``recovery``), replaced API servers (``replacement``), what API servers are told (``notices``).
"""

from __future__ import annotations

import logging

from penstock.exit_codes import EXIT_FATAL, EXIT_OK, describe_exit
from penstock.supervisor.children.actions import Action, ProcessName, ShowProgress
from penstock.supervisor.children.api_server_broadcast import ApiServerBroadcast
from penstock.supervisor.children.child_state import EXIT_GRACE_S, Child, ChildState, ChildTable
from penstock.supervisor.children.lifecycle import Lifecycle, Phase
from penstock.supervisor.children.recovery import Recovery, join_names
from penstock.supervisor.children.rolling_restart import RollingRestart
from penstock.wire.control import (
    ChildReport,
    DrainEngine,
    Heartbeat,
    Info,
    ProcessFailed,
    Progress,
    ProposeState,
    Ready,
    StatesAdopted,
)

HEARTBEAT_CHECK_INTERVAL_S = 1.0
"""How often to look at engines that must be heard, which speak as often."""
MAX_CHECK_DELAY_S = 2.0
"""A supervisor that looks this much later was stopped or starved itself, and perhaps its engines with it."""


class ProcessManager:
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
        names = [ProcessName("coordinator", 0)] if coordinator else []
        names += [ProcessName("engine", first_rank + index) for index in range(engines)]
        names += [ProcessName("api-server", index) for index in range(api_servers)]
        self._children = ChildTable(names, startup_timeout)
        self._lifecycle = Lifecycle(self._children, "api-server" if api_servers else "engine", drain_timeout)
        self._recovery = Recovery(self._children, self._lifecycle, lockstep=lockstep)
        self._rolling_restart = RollingRestart(self._children, api_servers)
        self._broadcast = ApiServerBroadcast(self._children, engines if all_engines is None else all_engines)
        self._startup_timeout = startup_timeout
        self._engine_hang_timeout = engine_hang_timeout
        self._checked_at = 0.0

    @property
    def phase(self) -> Phase:
        return self._lifecycle.current

    @property
    def exit_code(self) -> int | None:
        """None until every child is gone for good."""
        return self._lifecycle.exit_code

    def names(self) -> list[ProcessName]:
        """The coordinator, if there is one, then engines, then API servers."""
        return self._children.names()

    def info(self, name: ProcessName) -> Info:
        """What the child said of itself when it became ready."""
        return self._children[name].info

    def restarts(self, name: ProcessName) -> int:
        """How often the child was started again after it had died."""
        return self._children[name].restarts

    def next_deadline(self) -> float | None:
        """When :meth:`tick` has something to do."""
        deadlines = [child.deadline for child in self._children] + [self._lifecycle.deadline]
        if any(self._expects_heartbeat(child) for child in self._children):
            deadlines.append(self._checked_at + HEARTBEAT_CHECK_INTERVAL_S)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    # -- events, each returns what is to be done ---------------------------------------------------

    def start(self, now: float) -> list[Action]:
        """Starts everybody: API servers at once after the others, as they connect later."""
        for child in self._children:
            self._children.spawn(child, now)
        return self._children.take_actions()

    def report(self, name: ProcessName, report: ChildReport, now: float) -> list[Action]:
        """A message from a child that lives."""
        child = self._children[name]
        match report:
            case Progress():
                child.last_progress = report.text
                if child.state is ChildState.STARTING and not child.exiting:
                    child.deadline = now + self._startup_timeout
                self._children.add_action(ShowProgress(name, report))
            case Ready():
                self._on_ready(child, report, now)
            case Heartbeat():
                self._on_heartbeat(child, now)
            case DrainEngine():
                self._broadcast.drain_engine(child, report)
            case ProposeState():
                self._broadcast.propose(child, report)
            case StatesAdopted():
                self._broadcast.adopted(name, report.revision)
            case ProcessFailed():
                self._on_failure(child, report, now)
        return self._children.take_actions()

    def protocol_error(self, name: ProcessName, message: str, now: float) -> list[Action]:
        """The child broke the control channel's rules; it is killed."""
        child = self._children[name]
        self._on_failure(child, ProcessFailed(message=message, fatal=False), now)
        self._children.kill(child)
        return self._children.take_actions()

    def channel_closed(self, name: ProcessName, now: float) -> list[Action]:
        """The child closed its end of the control channel: its death follows, or is helped along."""
        child = self._children[name]
        if not child.exiting:
            child.exiting, child.deadline = True, now + EXIT_GRACE_S
        return self._children.take_actions()

    def start_failed(self, name: ProcessName, message: str, now: float) -> list[Action]:
        """There is no process: the machine refused it."""
        child = self._children[name]
        child.failure = ProcessFailed(message=message, fatal=False)
        self._on_exit(child, "could not be started", now)
        return self._children.take_actions()

    def exited(self, name: ProcessName, returncode: int, now: float) -> list[Action]:
        """The process is gone; ``returncode`` is negative for a signal, as subprocess gives it."""
        child = self._children[name]
        if returncode == EXIT_FATAL and child.failure is None:
            child.failure = ProcessFailed(message="it would fail the same way again", fatal=True)
        orderly = child.killed or returncode == EXIT_OK
        self._on_exit(child, describe_exit(returncode, killed=child.killed), now, orderly=orderly)
        return self._children.take_actions()

    def signalled(self, signum: int, now: float) -> list[Action]:
        """SIGINT, SIGTERM, or SIGHUP of a closed terminal.

        The first one drains; the next one ends the running streams with an error, one more kills.
        """
        self._lifecycle.signalled(signum, now)
        return self._children.take_actions()

    def start_rolling_restart(self, now: float) -> list[Action]:
        """SIGHUP: new API servers take the place of those that serve, one after the other."""
        if self.phase is not Phase.SERVING or self._rolling_restart.running:
            doing = "replacing API servers" if self._rolling_restart.running else self.phase.name.lower()
            self._children.log(logging.WARNING, f"SIGHUP while {doing}: passed over")
        else:
            self._rolling_restart.start(now)
        return self._children.take_actions()

    def tick(self, now: float) -> list[Action]:
        """Does what is due."""
        self._extend_deadlines_after_pause(now)
        for child in self._children:
            if child.deadline is not None and child.deadline <= now:
                child.deadline = None
                self._on_deadline(child, now)
        self._lifecycle.tick(now)
        return self._children.take_actions()

    # -- one child ---------------------------------------------------------------------------------

    def _on_ready(self, child: Child, report: Ready, now: float) -> None:
        if child.state is not ChildState.STARTING or child.exiting:
            self._children.log(logging.DEBUG, f"{child.name} reported ready out of turn")
            return
        child.state, child.deadline, child.info = ChildState.READY, None, report.info
        self._recovery.ready(child, now)
        self._on_heartbeat(child, now)
        if child.name.role == "api-server":
            self._broadcast.send_current_state(child)
        if child.replaces is not None:
            self._rolling_restart.take_over(child, now)
        elif self.phase is Phase.SERVING:
            self._children.log(logging.INFO, f"{child.name} is ready again")
        elif self.phase is Phase.STARTING:
            self._children.add_action(ShowProgress(child.name, Progress(text="ready", fraction=1.0)))
            if all(other.state is ChildState.READY for other in self._children):
                self._lifecycle.all_ready()
        self._broadcast.choose_throughput_logger()

    def _expects_heartbeat(self, child: Child) -> bool:
        """An engine that is ready must be heard again in time."""
        engine = child.name.role == "engine" and self._engine_hang_timeout > 0
        return engine and child.state is ChildState.READY and not child.exiting

    def _on_heartbeat(self, child: Child, now: float) -> None:
        if self._expects_heartbeat(child):
            child.deadline = now + self._engine_hang_timeout

    def _extend_deadlines_after_pause(self, now: float) -> None:
        """Time in which this process did not run counts as nobody's silence."""
        missed, self._checked_at = now - self._checked_at - HEARTBEAT_CHECK_INTERVAL_S, now
        if missed <= MAX_CHECK_DELAY_S:
            return
        for child in self._children:
            if self._expects_heartbeat(child) and child.deadline is not None:
                child.deadline = min(child.deadline + missed, now + self._engine_hang_timeout)

    def _on_failure(self, child: Child, failure: ProcessFailed, now: float) -> None:
        child.failure = child.failure or failure
        child.exiting, child.deadline = True, now + EXIT_GRACE_S

    def _on_deadline(self, child: Child, now: float) -> None:
        """The child's deadline has passed."""
        if child.state is ChildState.WAITING:
            self._children.spawn(child, now)
            return
        if child.state is ChildState.STARTING and not child.exiting:
            last = f"; it was at: {child.last_progress}" if child.last_progress else ""
            child.failure = ProcessFailed(
                message=f"not ready within {self._startup_timeout:g} s (--startup-timeout){last}",
                # What never worked is too slow for its timeout, and would be again.
                fatal=child.epoch == 0,
            )
        elif child.state is ChildState.READY and not child.exiting:
            fellows = self._recovery.group_peers(child)
            if any(other.killed for other in fellows):  # it falls with that one
                self._on_heartbeat(child, now)
                return
            child.failure = ProcessFailed(message=self._hang_message(fellows, now), fatal=False)
        self._children.kill(child)

    def _hang_message(self, fellows: list[Child], now: float) -> str:
        """What is to be said of a silent engine: those that compute in step with one that hangs wait for it
        within a step, and may have been heard of a little earlier or later."""
        told = f"not heard of for {self._engine_hang_timeout:g} s (--engine-hang-timeout)"
        soon = now + self._engine_hang_timeout / 2
        ready = [other for other in fellows if other.state is ChildState.READY and not other.exiting]
        silent = [other for other in ready if other.deadline is not None and other.deadline < soon]
        if not silent:
            return told
        return f"{told}, and {join_names(silent)} hardly less: one of them hangs, the others may wait for it"

    def _on_exit(self, child: Child, cause: str, now: float, *, orderly: bool = False) -> None:
        """Tells the death once, with its cause, and settles what follows."""
        retired = child.state is ChildState.RETIRING
        child.state, child.deadline = ChildState.GONE, None
        self._broadcast.forget(child.name)
        reason = f": {child.failure.message}" if child.failure else ""
        if self._lifecycle.ending:
            if not orderly:
                self._children.log(logging.WARNING, f"{child.name} {cause} while shutting down{reason}")
        elif self._recovery.in_group(child):
            self._recovery.restart_group(child, f"{cause}{reason}", now)
        elif retired:
            self._children.remove(child)
            told = "has served all it had" if orderly else f"{cause} before it had served all it had{reason}"
            self._children.log(logging.INFO if orderly else logging.WARNING, f"{child.name} {told}")
        else:
            self._children.log(logging.ERROR, f"{child.name} {cause}{reason}")
            if not self._rolling_restart.handle_exit(child, now):
                self._recovery.restart_or_give_up([child], now)
        self._lifecycle.advance(now)
