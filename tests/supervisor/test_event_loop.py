"""The supervisor's event loop when no process can be started; with processes it runs in test_main.py."""

from __future__ import annotations

import pytest

from penstock.exit_codes import EXIT_FAILED
from penstock.metrics.gc_policy import GarbageCollector
from penstock.supervisor.children.actions import ProcessName
from penstock.supervisor.children.child_process import ChildProcess
from penstock.supervisor.children.process_manager import ChildTimes, Fleet, ProcessManager
from penstock.supervisor.children.restart_policy import MAX_FAILED_STARTS
from penstock.supervisor.event_loop import StartupSigns, Supervisor
from penstock.supervisor.service_manager import ServiceManager
from penstock.supervisor.startup.progress_display import LogProgressDisplay
from penstock.supervisor.startup.startup_status import StartupStatus


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_a_server_that_cannot_be_started_is_given_up(expert_parallel: bool) -> None:
    """Also with an expert-parallel group, which is killed when its first engine cannot be started."""
    tried = []

    def start(name: ProcessName, epoch: int, listener: int) -> ChildProcess:
        tried.append(name)
        raise OSError("no more processes")

    manager = ProcessManager(
        Fleet(engines=2, api_servers=1, expert_parallel=expert_parallel),
        ChildTimes(startup_timeout=60, drain_timeout=1, engine_hang_timeout=60, api_server_hang_timeout=60),
    )
    supervisor = Supervisor(
        manager,
        start,
        StartupSigns(LogProgressDisplay(), StartupStatus(2), ServiceManager({}), lambda pids, infos: None),
        collector=GarbageCollector("off", 0.005),
    )
    assert supervisor.run() == EXIT_FAILED
    assert tried.count(ProcessName("engine", 1)) <= MAX_FAILED_STARTS
