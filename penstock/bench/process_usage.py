"""CPU time and memory of the processes of a server."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

import msgspec
import psutil

from penstock.bench.errors import BenchError

T = TypeVar("T")

MEMORY_INTERVAL_S = 0.05
"""Time between two samples of memory."""


class CpuTime(msgspec.Struct, frozen=True):
    """CPU seconds: ``total`` by a precise clock, if available; ``user`` and ``system`` in ticks of 10 ms."""

    total: float = 0.0
    user: float = 0.0
    system: float = 0.0

    def __add__(self, other: CpuTime) -> CpuTime:
        return CpuTime(self.total + other.total, self.user + other.user, self.system + other.system)

    def __sub__(self, other: CpuTime) -> CpuTime:
        return CpuTime(self.total - other.total, self.user - other.user, self.system - other.system)


class ServerPids(msgspec.Struct, frozen=True):
    """Process ids of a server, by role."""

    api_servers: tuple[int, ...]
    engines: tuple[int, ...] = ()
    coordinators: tuple[int, ...] = ()


def pids_of_supervisor(pid: int) -> ServerPids:
    """The processes that a Penstock supervisor has started, identified by their titles."""
    children = [(child.pid, title(child)) for child in alive(pid, lambda process: process.children())]
    return ServerPids(
        api_servers=tuple(pid for pid, name in children if name.startswith("penstock: api-server")),
        engines=tuple(pid for pid, name in children if name.startswith("penstock: engine")),
        coordinators=tuple(pid for pid, name in children if name.startswith("penstock: coordinator")),
    )


def pids_of_front_end(pid: int) -> ServerPids:
    """All processes of a Penstock supervisor, itself included, as one."""
    found = pids_of_supervisor(pid)
    return ServerPids((*found.api_servers, *found.engines, *found.coordinators, pid))


def pids_of_gateway(pid: int) -> ServerPids:
    """A gateway's processes: the supervisor, whose process id is ``pid``, and its workers."""
    return ServerPids((pid, *(child.pid for child in alive(pid, lambda process: process.children()))))


def resolve_pids(pids: Sequence[int]) -> ServerPids:
    """The processes to measure: those of a Penstock supervisor in its place, all of a gateway, others as
    given."""
    api_servers: list[int] = []
    engines: list[int] = []
    for pid in pids:
        titled = title(alive(pid, lambda process: process))
        if titled == "penstock: supervisor":
            below = pids_of_supervisor(pid)
            api_servers += below.api_servers
            engines += below.engines
        elif titled == "penstock: gateway":
            api_servers += pids_of_gateway(pid).api_servers
        else:
            api_servers.append(pid)
    return ServerPids(tuple(api_servers), tuple(engines))


def cpu_time(pids: Sequence[int]) -> CpuTime:
    """CPU time of processes since they started, including all threads.

    Raises BenchError when one does not exist.
    """
    return sum(map(_cpu_time, pids), CpuTime())


def resident_bytes(pids: Sequence[int]) -> int:
    """Sum of the resident memory of processes; shared pages count for each."""
    return sum(int(alive(pid, lambda process: process.memory_info().rss)) for pid in pids)


class PeakMemory:
    """Samples the resident memory of processes in a thread; use it as a context."""

    def __init__(self, pids: Sequence[int]) -> None:
        """Raises BenchError when one does not exist."""
        self._pids = pids
        self.before = resident_bytes(pids)
        """Sum over all processes at the start, in bytes."""
        self.peak = self.before
        """Maximum of that sum, in bytes."""
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="peak-memory", daemon=True)

    def __enter__(self) -> Self:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watcher.join()

    def _watch(self) -> None:
        with contextlib.suppress(BenchError):  # a process has exited; the measurement fails by itself
            while not self._done.wait(MEMORY_INTERVAL_S):
                self.peak = max(self.peak, resident_bytes(self._pids))


def _cpu_time(pid: int) -> CpuTime:
    times = alive(pid, lambda process: process.cpu_times())
    return CpuTime(_clock(pid, times.user + times.system), times.user, times.system)


def _clock(pid: int, ticks: float) -> float:
    """The process's CPU clock; ``ticks`` seconds where there is none.

    /proc/PID/stat counts ticks: on some kernels it shows a third of the CPU time of a process that runs in
    short bursts between them, as a server does.
    """
    if sys.platform != "linux":
        return ticks
    try:
        # The clock id as clock_getcpuclockid(3) computes it: CPUCLOCK_SCHED of the whole process.
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        raise BenchError(_gone(pid)) from None


def title(process: psutil.Process) -> str:
    """A process's title, or its command line."""
    return " ".join(process.cmdline()).strip()  # a title that is shorter than the command line is padded


def alive(pid: int, read: Callable[[psutil.Process], T]) -> T:
    """What ``read`` says of a process. Raises BenchError when there is none, or it is another user's."""
    try:
        return read(psutil.Process(pid))
    except psutil.NoSuchProcess:
        raise BenchError(_gone(pid)) from None
    except psutil.AccessDenied:
        raise BenchError(f"process {pid} belongs to another user, its CPU time cannot be read") from None


def _gone(pid: int) -> str:
    return f"process {pid} does not exist"
