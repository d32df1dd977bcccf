"""What the supervisor decides: a state machine over its children, without processes, sockets or clocks.

It is fed events (a report, an exit, a signal, the time) and answers each with the actions to take. Parts of
it: the states of a child (``child_state``), shutdown (``lifecycle``), restarts after a crash (``recovery``,
``restart_policy``), hung processes (``hang_detection``), replaced API servers (``rolling_restart``), and what
all API servers must know (``api_server_broadcast``).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from penstock.exit_codes import EXIT_FAILED, EXIT_FATAL, EXIT_OK, describe_exit
from penstock.supervisor.children.actions import Action, ProcessName, ShowProgress
from penstock.supervisor.children.api_server_broadcast import ApiServerBroadcast
from penstock.supervisor.children.child_state import EXIT_GRACE_S, Child, ChildState, ChildTable
from penstock.supervisor.children.desired_state_store import DesiredStateStore
from penstock.supervisor.children.hang_detection import HangDetector
from penstock.supervisor.children.lifecycle import Lifecycle, Phase
from penstock.supervisor.children.recovery import Recovery
from penstock.supervisor.children.rolling_restart import RollingRestart
from penstock.wire.control import (
    SERVER_ROLES,
    ChangeState,
    ChildReport,
    DrainEngine,
    Heartbeat,
    Info,
    ProcessFailed,
    Progress,
    Ready,
    Role,
    StatesReport,
)

MAX_MEDIA_HANG_S = 15.0
"""Hang timeout of media workers: pictures wait for one that is stopped, and its end costs no connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The children to start. Without API servers, as on a headless host, engines are drained instead."""

    engines: int = 0
    first_rank: int = 0
    """Rank of the first engine that starts here."""
    all_engines: int | None = None
    """Engines of all hosts; None: there are no others."""
    api_servers: int = 0
    gateways: int = 0
    """Workers of a gateway, which has no other children."""
    coordinator: bool = False
    media_workers: int = 0
    expert_parallel: bool = False
    """Whether the engines are one group, restarted together."""
    serves_with_one_engine: bool = False
    """Whether clients are served from the first engine on; otherwise from the last one on."""

    def names(self) -> list[ProcessName]:
        """All children, in the order of their start."""
        names = [ProcessName("coordinator", 0)] if self.coordinator else []
        names += [ProcessName("engine", self.first_rank + index) for index in range(self.engines)]
        names += [ProcessName("media-worker", index) for index in range(self.media_workers)]
        names += [ProcessName("api-server", index) for index in range(self.api_servers)]
        return names + [ProcessName("gateway", index) for index in range(self.gateways)]

    @property
    def drained(self) -> Role:
        """The role whose processes finish their requests before the others end."""
        return "gateway" if self.gateways else "api-server" if self.api_servers else "engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildTimes:
    """How long children may take, in seconds."""

    startup_timeout: float
    drain_timeout: float
    drain_grace: float = 0.0
    engine_hang_timeout: float = 0.0
    """A hang timeout of 0: these processes may be silent for any time."""
    api_server_hang_timeout: float = 0.0
    """The coordinator's, too, and the media workers' if it is short."""
    gateway_hang_timeout: float = 0.0

    def hang_timeouts(self) -> dict[Role, float]:
        """Seconds of silence after which a process of a role counts as hung."""
        return {
            "engine": self.engine_hang_timeout,
            "api-server": self.api_server_hang_timeout,
            "coordinator": self.api_server_hang_timeout,
            "media-worker": min(self.api_server_hang_timeout, MAX_MEDIA_HANG_S),
            "gateway": self.gateway_hang_timeout,
        }


class ProcessManager:
    """All children of one ``penstock serve`` or ``penstock gateway``. Times are those of
    :class:`~penstock.supervisor.running_clock.RunningClock`."""

    def __init__(
        self, fleet: Fleet, times: ChildTimes, desired_states: DesiredStateStore | None = None
    ) -> None:
        """``desired_states`` None: none so far."""
        self._children = ChildTable(fleet.names(), times.startup_timeout)
        self._lifecycle = Lifecycle(self._children, fleet.drained, times.drain_timeout, times.drain_grace)
        self._recovery = Recovery(self._children, self._lifecycle, expert_parallel=fleet.expert_parallel)
        self._hang_detector = HangDetector(self._children, self._recovery, times.hang_timeouts())
        self._rolling_restart = RollingRestart(
            self._children,
            fleet.api_servers or fleet.gateways,
            "workers" if fleet.gateways else "API servers",
        )
        self._broadcast = ApiServerBroadcast(
            self._children,
            fleet.engines if fleet.all_engines is None else fleet.all_engines,
            DesiredStateStore() if desired_states is None else desired_states,
        )
        self._startup_timeout = times.startup_timeout
        self._serves_with_one_engine = fleet.serves_with_one_engine

    @property
    def phase(self) -> Phase:
        return self._lifecycle.phase

    @property
    def is_replacing(self) -> bool:
        """A rolling restart runs."""
        return self._rolling_restart.running

    @property
    def may_replace(self) -> bool:
        """Whether :meth:`start_rolling_restart` starts one at once."""
        return self.phase is Phase.SERVING and not self._rolling_restart.running

    @property
    def exit_code(self) -> int | None:
        """None until every child is gone for good."""
        return self._lifecycle.exit_code

    def names(self) -> list[ProcessName]:
        """The coordinator, if there is one, then engines, media workers and API servers."""
        return self._children.names()

    def info(self, name: ProcessName) -> Info:
        """The child's description of itself when it became ready."""
        return self._children[name].info

    def restarts(self, name: ProcessName) -> int:
        """Restarts of the child after an exit that nobody asked for."""
        return self._children[name].restarts

    def next_deadline(self) -> float | None:
        """When :meth:`tick` has something to do."""
        deadlines = [child.deadline for child in self._children]
        deadlines.append(self._lifecycle.deadline)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    # -- events, each returns the actions to take --------------------------------------------------

    def start(self, now: float) -> list[Action]:
        """Start all children; API servers do not wait for the others, as they connect later."""
        for child in self._children:
            self._children.spawn(child, now)
        return self._children.take_actions()

    def report(self, name: ProcessName, report: ChildReport, now: float) -> list[Action]:
        """A message from a living child."""
        child = self._children[name]
        match report:
            case Progress():
                if child.state is ChildState.STARTING and not child.exiting:
                    child.last_progress = report.text
                    child.deadline = now + self._startup_timeout
                    self._children.add_action(ShowProgress(name, report))
            case Ready():
                self._on_ready(child, report, now)
            case Heartbeat():
                self._hang_detector.on_heartbeat(child, now)
            case DrainEngine():
                self._broadcast.drain_engine(child, report)
            case ChangeState():
                self._broadcast.change_state(child, report)
            case StatesReport():
                self._broadcast.on_states_report(name, report)
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
        """The child closed its end of the control channel: it exits within EXIT_GRACE_S, or is killed."""
        child = self._children[name]
        if not child.exiting:
            child.expect_exit(now + EXIT_GRACE_S)
        return self._children.take_actions()

    def start_failed(self, name: ProcessName, message: str, now: float) -> list[Action]:
        """The operating system refused to start the process."""
        child = self._children[name]
        child.failure, child.started = ProcessFailed(message=message, fatal=False), False
        self._on_exit(child, "could not be started", now)
        return self._children.take_actions()

    def exited(self, name: ProcessName, returncode: int, now: float) -> list[Action]:
        """The process has exited; ``returncode`` is negative for a signal, as subprocess gives it."""
        child = self._children[name]
        if returncode == EXIT_FATAL and child.failure is None:
            child.failure = ProcessFailed(message="it would fail the same way again", fatal=True)
        orderly = returncode == EXIT_OK or (child.killed and child.failure is None)
        self._on_exit(child, describe_exit(returncode, killed=child.killed), now, orderly=orderly)
        return self._children.take_actions()

    def signalled(self, signum: int, now: float) -> list[Action]:
        """SIGINT, SIGTERM, or SIGHUP of a closed terminal: shut down, or faster than before."""
        self._lifecycle.signalled(signum, now)
        return self._children.take_actions()

    def acceptor_failed(self, now: float) -> list[Action]:
        """No connection is accepted any more: running streams finish, the exit code is that of a failure."""
        if self._lifecycle.serving or self.phase is Phase.STARTING:
            self._lifecycle.begin_shutdown(EXIT_FAILED, now)
            self._lifecycle.advance(now)
        return self._children.take_actions()

    def start_rolling_restart(self, now: float) -> list[Action]:
        """SIGHUP: replace the servers one by one."""
        if self.phase is Phase.STARTING:
            self._rolling_restart.start_later()
        elif self.phase is not Phase.SERVING:
            text = f"SIGHUP while {self.phase.name.lower()}: ignored"
            self._children.log_rarely(logging.WARNING, "SIGHUP", text)
        else:
            self._rolling_restart.start(now)
        return self._children.take_actions()

    def tick(self, now: float) -> list[Action]:
        """Handle the deadlines that have passed."""
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
        child.ready(report.info)
        self._recovery.on_ready(child, now)
        self._hang_detector.on_heartbeat(child, now)
        if child.name.role == "api-server":
            self._broadcast.send_current_state(child)
        if child.name.role in SERVER_ROLES and self._lifecycle.serving:
            self._lifecycle.open_server(child)
        if child.replaces is not None:
            self._rolling_restart.take_over(child, now)
        elif self._lifecycle.serving:
            again = " again" if child.restarts else ""
            self._children.log(logging.INFO, f"{child.name} is ready{again}")
            self._rolling_restart.replace_next(now)
        elif self.phase is Phase.STARTING:
            self._children.add_action(ShowProgress(child.name, Progress(text="ready", fraction=1.0)))
            if self._all_ready():
                self._lifecycle.all_ready()
                self._rolling_restart.replace_next(now)
        self._broadcast.choose_throughput_logger()

    def _all_ready(self) -> bool:
        """Whether clients can be served for the first time."""
        waits_for = [child for child in self._children if child.state is not ChildState.READY]
        if not self._serves_with_one_engine:
            return not waits_for
        engines = self._children.with_role("engine", ChildState.READY)
        return bool(engines) and all(child.name.role == "engine" for child in waits_for)

    def _on_failure(self, child: Child, failure: ProcessFailed, now: float) -> None:
        child.failure = child.failure or failure
        child.expect_exit(now + EXIT_GRACE_S)

    def _on_deadline(self, child: Child, now: float) -> None:
        if child.state is ChildState.WAITING:
            self._children.spawn(child, now)
        elif self._hang_detector.is_watched(child):
            self._hang_detector.on_silence(child, now)
        else:
            if child.state is ChildState.STARTING and not child.exiting:
                child.failure = self._late_start(child)
            self._children.kill(child)

    def _late_start(self, child: Child) -> ProcessFailed:
        option = "" if child.name.role == "gateway" else " (--startup-timeout)"
        last = f"; it was at: {child.last_progress}" if child.last_progress else ""
        return ProcessFailed(
            message=f"not ready within {self._startup_timeout:g} s{option}{last}",
            # A first start that is too slow for its timeout would be again.
            fatal=child.epoch == 0,
        )

    def _on_exit(self, child: Child, cause: str, now: float, *, orderly: bool = False) -> None:
        """Log the exit once, with its cause, and decide what follows."""
        retired = child.state is ChildState.RETIRING
        child.exit()
        self._broadcast.forget(child.name)
        reason = f": {child.failure.message}" if child.failure else ""
        if self._lifecycle.shutting_down:
            if not orderly:
                self._children.log(logging.WARNING, f"{child.name} {cause} while shutting down{reason}")
        elif self._recovery.in_group(child):
            self._recovery.restart_group(child, f"{cause}{reason}", now)
        elif retired:
            self._children.remove(child)
            text = "has served all it had" if orderly else f"{cause} before it had served all it had{reason}"
            self._children.log(logging.INFO if orderly else logging.WARNING, f"{child.name} {text}")
        else:
            self._children.log(logging.ERROR, f"{child.name} {cause}{reason}")
            if not self._rolling_restart.handle_exit(child, now):
                self._recovery.restart_or_give_up([child], now)
        self._lifecycle.advance(now)
