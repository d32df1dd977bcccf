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

from penstock.metrics.garbage import Collector
from penstock.metrics.snapshot import Snapshot, encode_snapshot, process_name, process_series
from penstock.supervisor.actions import Action, Announce, Kill, Name, Say, Send, Show, Spawn
from penstock.supervisor.display import Display
from penstock.supervisor.fleet import Fleet
from penstock.supervisor.processes import Process
from penstock.supervisor.terminal import has_terminal
from penstock.wire.channel import ChildGone
from penstock.wire.control import ControlError, Info, SupervisorMetrics

log = logging.getLogger(__name__)

TELL_S = 1.0
"""Least time between two reports of what this process has counted; it wakes for none."""
_PROCESS = process_name("supervisor", 0)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


Announcement = Callable[[Mapping[Name, int], Mapping[Name, Info]], None]
"""Told once that all are ready: their process ids, and what each said of itself."""


class Supervisor:
    """Owns the child processes of one ``penstock serve``.

    Must be made and run in the main thread, which signals come to. ``start`` starts the process of a
    place in the fleet, given its epoch and its restarts; it may raise OSError. ``display`` shows progress
    until the first end of the start, and log lines tell what comes after.
    """

    def __init__(
        self,
        fleet: Fleet,
        start: Callable[[Name, int, int], Process],
        display: Display,
        announce: Announcement,
        collector: Collector,
    ) -> None:
        self._fleet = fleet
        self._start = start
        self._display = display
        self._announce = announce
        self._collector = collector
        self._actions: deque[Action] = deque()
        self._processes: dict[Name, Process] = {}
        self._selector = selectors.DefaultSelector()
        self._had_terminal = has_terminal()
        # As nohup leaves it; a SIGHUP that somebody sends replaces API servers all the same.
        self._outlives_terminal = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        self._told_at = -math.inf
        self._sequence = 0

    def run(self) -> int:
        """Until every child is gone for good; returns the exit code. No child survives an exception."""
        with self._signals() as wakeup:
            try:
                self._do(self._fleet.begin(time.monotonic()))
                while self._fleet.exit_code is None:
                    for key, _ in self._selector.select(self._timeout()):
                        if key.data is None:
                            self._on_signals(wakeup.recv(4096))
                        else:
                            self._on_message(key.data)
                    self._display.refresh()
                    self._do(self._fleet.tick(time.monotonic()))
                    self._collector.on_idle()
                    self._tell(time.monotonic())
                return self._fleet.exit_code
            finally:
                self._display.close()
                self._end_all()

    def _tell(self, now: float) -> None:
        """API servers what this process has counted."""
        if now < self._told_at + TELL_S:
            return
        self._told_at = now
        self._sequence += 1
        series = list(process_series(_PROCESS, 0, self._collector.pauses))
        message = SupervisorMetrics(snapshot=encode_snapshot(Snapshot(_PROCESS, 0, self._sequence, series)))
        for name, process in self._processes.items():
            if name.role == "api-server":
                with contextlib.suppress(ChildGone):
                    process.channel.offer(message)

    # -- events ------------------------------------------------------------------------------------

    def _timeout(self) -> float | None:
        deadline = self._fleet.next_deadline()
        waits = [] if deadline is None else [max(0.0, deadline - time.monotonic())]
        if self._display.refresh_s is not None:
            waits.append(self._display.refresh_s)
        return min(waits, default=None)

    def _on_signals(self, signums: bytes) -> None:
        for signum in signums:
            if signum == signal.SIGHUP and not (self._had_terminal and not has_terminal()):
                self._do(self._fleet.replace(time.monotonic()))
            elif signum == signal.SIGHUP and self._outlives_terminal:
                continue
            elif signum != signal.SIGCHLD:
                self._display.close()
                self._do(self._fleet.signalled(signum, time.monotonic()))
        if signal.SIGCHLD in signums:
            self._reap()

    def _on_message(self, name: Name) -> None:
        process = self._processes.get(name)
        if process is None:
            return  # reaped since the selector returned
        try:
            for report in process.channel.receive():
                self._do(self._fleet.report(name, report, time.monotonic()))
        except ChildGone:
            self._unwatch(process)
            self._do(self._fleet.hung_up(name, time.monotonic()))
        except ControlError as error:
            self._unwatch(process)
            self._do(self._fleet.misbehaved(name, str(error), time.monotonic()))

    def _reap(self) -> None:
        for name, process in list(self._processes.items()):
            returncode = process.poll()
            if returncode is None:
                continue
            self._last_words(name, process)
            del self._processes[name]
            self._unwatch(process)
            process.close()
            self._do(self._fleet.died(name, returncode, time.monotonic()))

    def _last_words(self, name: Name, process: Process) -> None:
        """What a dead child said before it died, above all why."""
        with contextlib.suppress(ChildGone, ControlError):
            for report in process.channel.receive():
                self._do(self._fleet.report(name, report, time.monotonic()))

    # -- actions -----------------------------------------------------------------------------------

    def _do(self, actions: list[Action]) -> None:
        """In order: what an action leads to (a process that cannot be started) comes after the others."""
        busy = bool(self._actions)
        self._actions += actions
        while self._actions and not busy:
            self._do_one(self._actions[0])
            self._actions.popleft()

    def _do_one(self, action: Action) -> None:
        match action:
            case Spawn(name, epoch):
                self._spawn(name, epoch)
            case Send(name, order):
                with contextlib.suppress(ChildGone):  # its death is reported on its own
                    self._processes[name].channel.send(order)
            case Kill(name):
                if name in self._processes:  # it may have been ordered together with a start that failed
                    self._processes[name].kill()
            case Show(name, progress):
                self._display.progress(str(name), progress)
            case Say(level, text):
                log.log(level, text)
            case Announce():
                self._display.close()
                self._announce(
                    {name: self._processes[name].pid for name in self._fleet.names()},
                    {name: self._fleet.info(name) for name in self._fleet.names()},
                )
                self._collector.start()

    def _spawn(self, name: Name, epoch: int) -> None:
        try:
            process = self._start(name, epoch, self._fleet.restarts(name))
        except OSError as error:
            self._do(self._fleet.could_not_start(name, str(error), time.monotonic()))
            return
        self._processes[name] = process
        self._selector.register(process.channel, selectors.EVENT_READ, name)
        log.debug("%s is process %d", name, process.pid)

    def _unwatch(self, process: Process) -> None:
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
        for signum in (*_ENDING, signal.SIGCHLD):
            if signum in (signal.SIGCHLD, signal.SIGHUP) or signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, _noted)
        try:
            yield read
        finally:
            signal.set_wakeup_fd(wakeup_before)
            self._selector.close()
            read.close()
            write.close()

    def _end_all(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.close()
        self._processes.clear()


def _noted(signum: int, frame: FrameType | None) -> None:
    """The wake-up descriptor has it."""
