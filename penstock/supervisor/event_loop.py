"""The supervisor's loop: carries out what the fleet decides, with real processes, signals and time."""

from __future__ import annotations

import contextlib
import logging
import math
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

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
from penstock.supervisor.signals import has_controlling_terminal
from penstock.supervisor.startup.progress_display import ProgressDisplay
from penstock.wire.channel import ChildGone
from penstock.wire.control import ControlError, Info, SupervisorMetrics

log = logging.getLogger(__name__)

METRICS_INTERVAL_S = 1.0
"""Least time between two reports of what this process has counted; it wakes for none."""
_PROCESS = process_name("supervisor", 0)
_TERMINATION_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


OnAllReady = Callable[[Mapping[ProcessName, int], Mapping[ProcessName, Info]], None]
"""Told once that all are ready: their process ids, and what each said of itself."""


class Supervisor:
    """Owns the child processes of one ``penstock serve``.

    Must be made and run in the main thread, which signals come to. ``start`` starts the process of a
    place in the fleet, given its epoch and its restarts; it may raise OSError. ``display`` shows progress
    until the first end of the start, and log lines tell what comes after.
    """

    def __init__(
        self,
        fleet: ProcessManager,
        start: Callable[[ProcessName, int, int], ChildProcess],
        display: ProgressDisplay,
        announce: OnAllReady,
        collector: GarbageCollector,
    ) -> None:
        self._manager = fleet
        self._start = start
        self._display = display
        self._announce = announce
        self._collector = collector
        self._actions: deque[Action] = deque()
        self._processes: dict[ProcessName, ChildProcess] = {}
        self._selector = selectors.DefaultSelector()
        self._had_terminal = has_controlling_terminal()
        # As nohup leaves it; a SIGHUP that somebody sends replaces API servers all the same.
        self._ignored_sighup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        self._metrics_sent_at = -math.inf
        self._sequence = 0

    def run(self) -> int:
        """Until every child is gone for good; returns the exit code. No child survives an exception."""
        with self._signals() as wakeup:
            try:
                self._execute(self._manager.start(time.monotonic()))
                while self._manager.exit_code is None:
                    for key, _ in self._selector.select(self._timeout()):
                        if key.data is None:
                            self._on_signals(wakeup.recv(4096))
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
        """API servers what this process has counted."""
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

    # -- events ------------------------------------------------------------------------------------

    def _timeout(self) -> float | None:
        deadline = self._manager.next_deadline()
        waits = [] if deadline is None else [max(0.0, deadline - time.monotonic())]
        if self._display.refresh_s is not None:
            waits.append(self._display.refresh_s)
        return min(waits, default=None)

    def _on_signals(self, signums: bytes) -> None:
        for signum in signums:
            if signum == signal.SIGHUP and not (self._had_terminal and not has_controlling_terminal()):
                self._execute(self._manager.start_rolling_restart(time.monotonic()))
            elif signum == signal.SIGHUP and self._ignored_sighup:
                continue
            elif signum != signal.SIGCHLD:
                self._display.close()
                self._execute(self._manager.signalled(signum, time.monotonic()))
        if signal.SIGCHLD in signums:
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
        """What a dead child said before it died, above all why."""
        with contextlib.suppress(ChildGone, ControlError):
            for report in process.channel.receive():
                self._execute(self._manager.report(name, report, time.monotonic()))

    # -- actions -----------------------------------------------------------------------------------

    def _execute(self, actions: list[Action]) -> None:
        """In order: what an action leads to (a process that cannot be started) comes after the others."""
        busy = bool(self._actions)
        self._actions += actions
        while self._actions and not busy:
            self._execute_one(self._actions[0])
            self._actions.popleft()

    def _execute_one(self, action: Action) -> None:
        match action:
            case Spawn(name, epoch):
                self._spawn(name, epoch)
            case Send(name, order):
                with contextlib.suppress(ChildGone):  # its death is reported on its own
                    self._processes[name].channel.send(order)
            case Kill(name):
                if name in self._processes:  # it may have been ordered together with a start that failed
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

    # -- lifetime ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[socket.socket]:
        """Signals as bytes on a socket, so that they are handled between events, never within one.

        The handlers stay, so that a late signal does not break into what the caller cleans up.
        """
        read, write = socket.socketpair()
        read.setblocking(False)
        write.setblocking(False)
        self._selector.register(read, selectors.EVENT_READ, None)
        wakeup_before = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        for signum in (*_TERMINATION_SIGNALS, signal.SIGCHLD):
            if signum in (signal.SIGCHLD, signal.SIGHUP) or signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, _ignore_signal)
        try:
            yield read
        finally:
            signal.set_wakeup_fd(wakeup_before)
            self._selector.close()
            read.close()
            write.close()

    def _kill_all(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.close()
        self._processes.clear()


def _ignore_signal(signum: int, frame: FrameType | None) -> None:
    """The wake-up descriptor has it."""
