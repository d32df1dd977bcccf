"""CPU time and memory of processes."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time

import pytest

from penstock.bench import process_usage
from penstock.bench.errors import BenchError
from penstock.bench.process_usage import (
    CpuTime,
    PeakMemory,
    ServerPids,
    cpu_time,
    pids_of_supervisor,
    resident_bytes,
    resolve_pids,
)

TITLED = (
    "import sys, setproctitle; setproctitle.setproctitle(sys.argv[1]); print(flush=True); sys.stdin.read()"
)
FAMILY = """
import subprocess, sys, setproctitle
setproctitle.setproctitle("penstock: supervisor")
titles = ["penstock: engine 0", "penstock: api-server 0", "penstock: api-server 1", "penstock: other"]
children = [subprocess.Popen([sys.executable, "-c", sys.argv[1], title], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE) for title in titles]
for child in children:
    child.stdout.readline()
print(*(child.pid for child in children), flush=True)
sys.stdin.read()
"""


def test_cpu_time_is_that_of_the_process_clock() -> None:
    first = time.process_time()
    before, second = cpu_time([os.getpid()]), time.process_time()
    while time.process_time() < second + 0.1:
        pass
    third = time.process_time()
    spent, last = cpu_time([os.getpid()]) - before, time.process_time()
    assert third - second - 0.02 <= spent.total <= last - first + 0.02
    assert spent.user + spent.system == pytest.approx(spent.total, abs=0.05)


def test_cpu_time_of_several_is_their_sum() -> None:
    one = cpu_time([os.getpid()]).total
    assert 2 * one <= cpu_time([os.getpid()] * 2).total < 2 * one + 0.5
    assert cpu_time([]) == CpuTime(0.0, 0.0, 0.0)


def test_memory_is_that_of_a_python() -> None:
    assert 5 * 2**20 < resident_bytes([os.getpid()]) < 2**36


def test_a_process_that_ended_is_named() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    for read in (cpu_time, resident_bytes, resolve_pids):
        with pytest.raises(BenchError, match=f"process {child.pid} does not exist"):
            read([child.pid])


def test_children_of_a_supervisor_are_told_by_title() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FAMILY, TITLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as supervisor:
        assert supervisor.stdout is not None
        engine, first, second, _ = map(int, supervisor.stdout.readline().split())
        expected = ServerPids(api_servers=(first, second), engines=(engine,))
        assert pids_of_supervisor(supervisor.pid) == expected
        assert resolve_pids([supervisor.pid]) == expected
        assert resolve_pids([first]) == ServerPids(api_servers=(first,))
        supervisor.communicate(b"")


def test_the_peak_of_memory_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 MiB come and go while another thread looks."""
    monkeypatch.setattr(process_usage, "MEMORY_INTERVAL_S", 0.001)
    with PeakMemory([os.getpid()]) as memory:
        ballast = mmap.mmap(-1, 2**25)  # not from the heap, which may have room without growing
        ballast.write(b"x" * 2**25)
        end = time.monotonic() + 60
        while memory.peak < memory.before + 2**24:
            assert time.monotonic() < end
            time.sleep(0.001)
        ballast.close()
    assert memory.peak >= memory.before + 2**24


def test_a_process_that_ends_is_watched_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_usage, "MEMORY_INTERVAL_S", 0.001)
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    with PeakMemory([child.pid]) as memory:
        child.communicate()
    assert memory.peak >= memory.before > 0
