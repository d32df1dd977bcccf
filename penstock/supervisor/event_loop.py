"""The supervisor's event loop: carries out the process manager's actions with real processes and time."""

from __future__ import annotations

import contextlib
import logging
import math
import selectors
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from penstock.logging_setup import RateLimitedLog
from penstock.metrics.families import RESTARTS
from penstock.metrics.gc_policy import GarbageCollector
from penstock.metrics.snapshot import Series, Snapshot, encode_snapshot, process_name, process_series
from penstock.supervisor.children.actions import (
    Action,
    AnnounceReady,
    Kill,
    NothingReplaced,
    ProcessName,
    ReplaceAgain,
    Send,
    ShowProgress,
    Spawn,
    WriteLog,
)
from penstock.supervisor.children.child_process import MAX_REPORTS_PER_S, ChildProcess
from penstock.supervisor.children.child_starter import reap_orphans
from penstock.supervisor.children.lifecycle import Phase
from penstock.supervisor.children.process_manager import ProcessManager
from penstock.supervisor.running_clock import MAX_WAIT_S, RunningClock
from penstock.supervisor.service_manager import ServiceManager, ServiceState
from penstock.supervisor.signals import SignalReceiver, SignalRequest
from penstock.supervisor.startup.progress_display import ProgressDisplay
from penstock.supervisor.startup.startup_status import STOPPING, StartupStatus
from penstock.wire.channel import ChildGone
from penstock.wire.control import SERVER_ROLES, ControlError, Info, SupervisorCommand, SupervisorMetrics

log = logging.getLogger(__name__)

METRICS_INTERVAL_S = 1.0
"""Minimum time between two reports of this process's metrics; it does not wake up to send one."""
_PROCESS = process_name("supervisor", 0)
_FINAL_READS = 16
"""Reads of what a child reported before it exited: far more than its socket holds."""

StartProcess = Callable[[ProcessName, int, int], ChildProcess]
"""Starts a child's process, given its name, epoch and restarts. May raise OSError."""
OnAllReady = Callable[[Mapping[ProcessName, int], Mapping[ProcessName, Info]], None]
"""Called once, when all children are ready, with their process ids and their descriptions of themselves."""


class StartupSigns(NamedTuple):
    """Who is told how far a start is."""

    display: ProgressDisplay
    """Shows progress until the first start is over; later progress is logged."""
    status: StartupStatus
    service_manager: ServiceManager
    announce: OnAllReady


class Supervisor:
    """Owns the child processes of one ``penstock serve``.

    Must be made and run in the main thread, which receives the signals.
    """

    def __init__(
        self,
        manager: ProcessManager,
        start: StartProcess,
        signs: StartupSigns,
        *,
        collector: GarbageCollector,
        acceptor_failure: socket.socket | None = None,
        prepare_replacement: Callable[[], Sequence[SupervisorCommand] | None] = lambda: (),
        on_nothing_replaced: Callable[[], None] = lambda: None,
    ) -> None:
        """``acceptor_failure`` becomes readable when no connection is accepted any more.
        ``prepare_replacement`` is called before servers are replaced: what those that serve are told first,
        or None if they should not be.
        ``on_nothing_replaced`` is called when the first of them could not be."""
        self._manager = manager
        self._start = start
        self._display, self._status, self._service_manager, self._announce = signs
        self._acceptor_failure = acceptor_failure
        self._prepare_replacement = prepare_replacement
        self._on_nothing_replaced = on_nothing_replaced
        self._collector = collector
        self._actions: deque[Action] = deque()
        self._processes: dict[ProcessName, ChildProcess] = {}
        self._paused: dict[ProcessName, float] = {}
        """Children that report too much, and when their reports are read again."""
        self._selector = selectors.DefaultSelector()
        self._signals = SignalReceiver()
        self._clock = RunningClock()
        self._rarely = {level: RateLimitedLog(log, level) for level in (logging.INFO, logging.WARNING)}
        self._metrics_sent_at = -math.inf
        self._sequence = 0

    def run(self) -> int:
        """Run until every child is gone for good; return the exit code. No child survives an exception."""
        with self._signals, self._selector:
            self._selector.register(self._signals, selectors.EVENT_READ, None)
            if self._acceptor_failure is not None:
                self._selector.register(self._acceptor_failure, selectors.EVENT_READ, None)
            try:
                self._execute(self._manager.start(self._clock.now()))
                while self._manager.exit_code is None:
                    events = self._wait()
                    self._on_signals()
                    for key, ready in events:
                        if key.fileobj is self._acceptor_failure:
                            self._selector.unregister(self._acceptor_failure)
                            self._execute(self._manager.acceptor_failed(self._clock.now()))
                        elif key.data is not None:
                            self._on_channel(key.data, ready)
                    self._display.refresh()
                    self._execute(self._manager.tick(self._clock.now()))
                    self._collector.on_idle()
                    self._send_metrics(self._clock.now())
                    self._tell_service_manager()
                return self._manager.exit_code
            finally:
                self._display.close()
                self._kill_all()

    def _tell_service_manager(self) -> None:
        service = self._service_manager
        if self._manager.phase is Phase.STARTING:
            service.set_status(self._status.report.phase)
        elif self._manager.phase is not Phase.SERVING:
            service.set_state(ServiceState.STOPPING)
        else:
            service.set_status("serving")
            service.set_state(ServiceState.RELOADING if self._manager.is_replacing else ServiceState.READY)
        service.beat()

    def _send_metrics(self, now: float) -> None:
        """Send this process's metrics to all API servers, when they are due."""
        if now < self._metrics_sent_at + METRICS_INTERVAL_S:
            return
        self._metrics_sent_at = now
        self._sequence += 1
        series = list(process_series(_PROCESS, 0, self._collector.pauses))
        for name in self._processes:
            if name.role == "media-worker":  # it has no metrics of its own
                labels = (process_name(name.role, name.index),)
                series.append(Series(RESTARTS.name, labels, self._manager.restarts(name)))
        message = SupervisorMetrics(snapshot=encode_snapshot(Snapshot(_PROCESS, 0, self._sequence, series)))
        for name in self._processes:
            if name.role == "api-server":
                self._send(name, message)

    def _wait(self) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for the next event or deadline."""
        now = self._clock.now()
        for name in [name for name, until in self._paused.items() if until <= now]:
            del self._paused[name]
            self._watch(name)
        timeout = 0.0 if self._signals.pending else max(0.0, min([*self._due_times(now)]) - now)
        self._clock.wait(timeout)
        return self._selector.select(timeout)

    def _due_times(self, now: float) -> Iterator[float]:
        yield now + MAX_WAIT_S
        yield from self._paused.values()
        if (deadline := self._manager.next_deadline()) is not None:
            yield deadline
        if self._display.refresh_s is not None:
            yield now + self._display.refresh_s

    # -- events ------------------------------------------------------------------------------------

    def _on_signals(self) -> None:
        requests = [(signum, self._signals.request(signum)) for signum in self._signals.receive()]
        for signum, request in requests:
            if request is SignalRequest.ROLLING_RESTART:
                self._replace_servers()
            elif request is SignalRequest.SHUT_DOWN:
                self._display.close()
                if self._manager.phase is Phase.STARTING:
                    self._status.set_phase(STOPPING)
                self._execute(self._manager.signalled(signum, self._clock.now()))
        if any(request is SignalRequest.REAP for _, request in requests):
            self._reap()

    def _replace_servers(self) -> None:
        if self._manager.may_replace:
            commands = self._prepare_replacement()
            if commands is None:
                return
            for name in (name for name in self._processes if name.role in SERVER_ROLES):
                for command in commands:
                    self._send(name, command)
        self._execute(self._manager.start_rolling_restart(self._clock.now()))

    def _on_channel(self, name: ProcessName, events: int) -> None:
        process = self._processes.get(name)
        if process is None:
            return  # reaped since the selector returned
        try:
            if events & selectors.EVENT_WRITE:
                process.channel.flush()
            if events & selectors.EVENT_READ:
                self._read(name, process)
        except ChildGone:
            process.listening = False
            self._execute(self._manager.channel_closed(name, self._clock.now()))
        except ControlError as error:
            process.listening = False
            self._execute(self._manager.protocol_error(name, str(error), self._clock.now()))
        self._watch(name)

    def _read(self, name: ProcessName, process: ChildProcess) -> None:
        reports = process.channel.receive()
        for report in reports:
            self._execute(self._manager.report(name, report, self._clock.now()))
        now = self._clock.now()
        process.count_reports(len(reports), now)
        if (until := process.paused_until(now)) is not None:
            self._paused[name] = until
            text = "%s sends more than %d reports a second on its control channel; the rest waits"
            self._rarely[logging.WARNING](f"flood of {name}", text, name, MAX_REPORTS_PER_S)

    def _send(self, name: ProcessName, command: SupervisorCommand) -> None:
        with contextlib.suppress(ChildGone):  # its exit is reported separately
            self._processes[name].channel.send(command)
        self._watch(name)

    def _watch(self, name: ProcessName) -> None:
        """Poll a child's channel: for reports unless it is paused, and for room while messages wait."""
        process = self._processes.get(name)
        if process is None:
            return
        events = 0
        if process.listening:
            events |= 0 if name in self._paused else selectors.EVENT_READ
            events |= selectors.EVENT_WRITE if process.channel.unsent else 0
        key = self._selector.get_map().get(process.channel)
        if key is None and events:
            self._selector.register(process.channel, events, name)
        elif key is not None and not events:
            self._selector.unregister(process.channel)
        elif key is not None and key.events != events:
            self._selector.modify(process.channel, events, name)

    def _reap(self) -> None:
        for name, process in list(self._processes.items()):
            returncode = process.poll()
            if returncode is None:
                continue
            self._read_final_reports(name, process)
            process.listening = False
            self._watch(name)
            self._paused.pop(name, None)
            del self._processes[name]
            process.close()
            self._execute(self._manager.exited(name, returncode, self._clock.now()))
        reap_orphans({process.pid for process in self._processes.values()})

    def _read_final_reports(self, name: ProcessName, process: ChildProcess) -> None:
        """What a child reported before it exited, above all why."""
        with contextlib.suppress(ChildGone, ControlError):
            for _ in range(_FINAL_READS if process.listening else 0):
                for report in process.channel.receive():
                    self._execute(self._manager.report(name, report, self._clock.now()))

    # -- actions -----------------------------------------------------------------------------------

    def _execute(self, actions: list[Action]) -> None:
        """In order: actions that follow from one of these (a start that fails) come after the others."""
        busy = bool(self._actions)
        self._actions += actions
        while self._actions and not busy:
            self._execute_one(self._actions[0])
            self._actions.popleft()

    def _execute_one(self, action: Action) -> None:
        match action:
            case Spawn(name, epoch):
                self._spawn(name, epoch)
            case Send(name, command):
                self._send(name, command)
            case Kill(name):
                if name in self._processes:  # its start, ordered together with the kill, may have failed
                    self._processes[name].kill()
            case ShowProgress(name, progress):
                self._display.progress(str(name), progress)
                self._status.progress(str(name), progress)
            case WriteLog(level, text, subject):
                if subject is None:
                    log.log(level, text)
                else:
                    self._rarely[level](subject, "%s", text)
            case NothingReplaced():
                self._on_nothing_replaced()
            case ReplaceAgain():
                self._replace_servers()
            case AnnounceReady():
                self._display.close()
                self._announce(
                    {name: self._processes[name].pid for name in self._manager.names()},
                    {name: self._manager.info(name) for name in self._manager.names()},
                )
                self._collector.start()

    def _spawn(self, name: ProcessName, epoch: int) -> None:
        try:
            process = self._start(name, epoch, self._manager.restarts(name))
        except OSError as error:
            self._execute(self._manager.start_failed(name, str(error), self._clock.now()))
            return
        self._processes[name] = process
        self._watch(name)
        log.debug("%s is process %d", name, process.pid)

    def _kill_all(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.close()
        self._processes.clear()
