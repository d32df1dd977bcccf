"""The supervisor's loop where the machine refuses processes; with processes it runs in test_main.py."""

from __future__ import annotations

import pytest

from penstock.metrics.garbage import GarbageCollector
from penstock.supervisor.actions import ProcessName
from penstock.supervisor.display import LogProgressDisplay
from penstock.supervisor.exits import EXIT_FAILED
from penstock.supervisor.fleet import ProcessManager
from penstock.supervisor.loop import Supervisor
from penstock.supervisor.processes import ChildProcess
from penstock.supervisor.restart import MAX_FAILED_STARTS


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_fleet_that_cannot_be_started_is_given_up(lockstep: bool) -> None:
    """Also engines in lock-step, which are ended together with the first one that is not started."""
    tried = []

    def start(name: ProcessName, epoch: int, listener: int) -> ChildProcess:
        tried.append(name)
        raise OSError("no more processes")

    fleet = ProcessManager(
        engines=2,
        api_servers=1,
        startup_timeout=60,
        drain_timeout=1,
        engine_hang_timeout=60,
        lockstep=lockstep,
    )
    supervisor = Supervisor(
        fleet, start, LogProgressDisplay(), lambda pids, infos: None, GarbageCollector("off", 0.005)
    )
    assert supervisor.run() == EXIT_FAILED
    assert tried.count(ProcessName("engine", 1)) <= MAX_FAILED_STARTS
