"""The supervisor's loop where the machine refuses processes; with processes it runs in test_main.py."""

from __future__ import annotations

import pytest

from penstock.exit_codes import EXIT_FAILED
from penstock.metrics.gc_policy import GarbageCollector
from penstock.supervisor.children.actions import ProcessName
from penstock.supervisor.children.child_process import ChildProcess
from penstock.supervisor.children.process_manager import ProcessManager
from penstock.supervisor.children.restart_policy import MAX_FAILED_STARTS
from penstock.supervisor.event_loop import Supervisor
from penstock.supervisor.startup.progress_display import LogProgressDisplay


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
