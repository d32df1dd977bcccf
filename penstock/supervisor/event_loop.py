"""The supervisor's event loop: carries out the process manager's actions with real processes and time."""

from __future__ import annotations

import contextlib
import logging
import math
import selectors
import time
from collections import deque
from collections.abc import Callable, Mapping

from penstock.metrics.gc_policy import GarbageCollector
from penstock.metrics.snapshot import Snapshot, encode_snapshot, process_name, process_series
from penstock.supervisor.children.actions import (
    Action,
    AnnounceReady,
    Kill,
    ProcessName,
    Send,
    ShowProgress,
    Spawn,
    WriteLog,
)
from penstock.supervisor.children.child_process import ChildProcess
from penstock.supervisor.children.process_manager import ProcessManager
from penstock.supervisor.signals import SignalReceiver, SignalRequest
from penstock.supervisor.startup.progress_display import ProgressDisplay
from penstock.wire.channel import ChildGone
from penstock.wire.control import ControlError, Info, SupervisorMetrics

log = logging.getLogger(__name__)

METRICS_INTERVAL_S = 1.0
"""Minimum time between two reports of this process's metrics; it does not wake up to send one."""
_PROCESS = process_name("supervisor", 0)


StartProcess = Callable[[ProcessName, int, int], ChildProcess]
"""Starts a child's process, given its name, epoch and restarts. May raise OSError."""
OnAllReady = Callable[[Mapping[ProcessName, int], Mapping[ProcessName, Info]], None]
"""Called once, when all children are ready, with their process ids and their descriptions of themselves."""


class Supervisor:
    """Owns the child processes of one ``penstock serve``.

    Must be made and run in the main thread, which receives the signals. ``display`` shows progress until the
    first start is over; later progress is logged.
    """

    def __init__(
        self,
        manager: ProcessManager,
        start: StartProcess,
        *,
        display: ProgressDisplay,
        announce: OnAllReady,
        collector: GarbageCollector,
    ) -> None:
        self._manager = manager
        self._start = start
        self._display = display
        self._announce = announce
        self._collector = collector
        self._actions: deque[Action] = deque()
        self._processes: dict[ProcessName, ChildProcess] = {}
        self._selector = selectors.DefaultSelector()
        self._signals = SignalReceiver()
        self._metrics_sent_at = -math.inf
        self._sequence = 0

    def run(self) -> int:
        """Runs until every child is gone for good; returns the exit code. No child survives an exception."""
        with self._signals, self._selector:
            self._selector.register(self._signals, selectors.EVENT_READ, None)
            try:
                self._execute(self._manager.start(time.monotonic()))
                while self._manager.exit_code is None:
                    for key, _ in self._selector.select(self._timeout()):
                        if key.data is None:
                            self._on_signals()
                        else:
                            self._on_message(key.data)
                    self._display.refresh()
                    self._execute(self._manager.tick(time.monotonic()))
                    self._collector.on_idle()
                    self._send_metrics(time.monotonic())
                return self._manager.exit_code
            finally:
                self._display.close()
                self._kill_all()

    def _send_metrics(self, now: float) -> None:
        """Sends this process's metrics to all API servers, when they are due."""
        if now < self._metrics_sent_at + METRICS_INTERVAL_S:
            return
        self._metrics_sent_at = now
        self._sequence += 1
        series = list(process_series(_PROCESS, 0, self._collector.pauses))
        message = SupervisorMetrics(snapshot=encode_snapshot(Snapshot(_PROCESS, 0, self._sequence, series)))
        for name, process in self._processes.items():
            if name.role == "api-server":
                with contextlib.suppress(ChildGone):
                    process.channel.offer(message)

    def _timeout(self) -> float | None:
        deadline = self._manager.next_deadline()
        waits = [] if deadline is None else [max(0.0, deadline - time.monotonic())]
        if self._display.refresh_s is not None:
            waits.append(self._display.refresh_s)
        return min(waits, default=None)

    # -- events ------------------------------------------------------------------------------------

    def _on_signals(self) -> None:
        requests = [(signum, self._signals.request(signum)) for signum in self._signals.receive()]
        for signum, request in requests:
            if request is SignalRequest.ROLLING_RESTART:
                self._execute(self._manager.start_rolling_restart(time.monotonic()))
            elif request is SignalRequest.SHUT_DOWN:
                self._display.close()
                self._execute(self._manager.signalled(signum, time.monotonic()))
        if any(request is SignalRequest.REAP for _, request in requests):
            self._reap()

    def _on_message(self, name: ProcessName) -> None:
        process = self._processes.get(name)
        if process is None:
            return  # reaped since the selector returned
        try:
            for report in process.channel.receive():
                self._execute(self._manager.report(name, report, time.monotonic()))
        except ChildGone:
            self._unregister(process)
            self._execute(self._manager.channel_closed(name, time.monotonic()))
        except ControlError as error:
            self._unregister(process)
            self._execute(self._manager.protocol_error(name, str(error), time.monotonic()))

    def _reap(self) -> None:
        for name, process in list(self._processes.items()):
            returncode = process.poll()
            if returncode is None:
                continue
            self._read_final_reports(name, process)
            del self._processes[name]
            self._unregister(process)
            process.close()
            self._execute(self._manager.exited(name, returncode, time.monotonic()))

    def _read_final_reports(self, name: ProcessName, process: ChildProcess) -> None:
        """What a child reported before it exited, above all why."""
        with contextlib.suppress(ChildGone, ControlError):
            for report in process.channel.receive():
                self._execute(self._manager.report(name, report, time.monotonic()))

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
                with contextlib.suppress(ChildGone):  # its exit is reported separately
                    self._processes[name].channel.send(command)
            case Kill(name):
                if name in self._processes:  # its start, ordered together with the kill, may have failed
                    self._processes[name].kill()
            case ShowProgress(name, progress):
                self._display.progress(str(name), progress)
            case WriteLog(level, text):
                log.log(level, text)
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
            self._execute(self._manager.start_failed(name, str(error), time.monotonic()))
            return
        self._processes[name] = process
        self._selector.register(process.channel, selectors.EVENT_READ, name)
        log.debug("%s is process %d", name, process.pid)

    def _unregister(self, process: ChildProcess) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(process.channel)

    def _kill_all(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.close()
        self._processes.clear()
