"""The workers of a gateway are servers as API servers are: opened, drained and replaced."""

from __future__ import annotations

import signal

from penstock.exit_codes import EXIT_FATAL, EXIT_USAGE
from penstock.supervisor.children.actions import AnnounceReady, ProcessName, Send, Spawn
from penstock.supervisor.children.process_manager import ChildTimes, Fleet, ProcessManager
from penstock.wire.control import AcceptConnections, AnnounceDrain, Drain, ProcessFailed, Ready
from tests.supervisor.children.managers import done, errors, ready, said

FIRST, SECOND, THIRD = (ProcessName("gateway", index) for index in range(3))


def make() -> ProcessManager:
    return ProcessManager(
        Fleet(gateways=2), ChildTimes(startup_timeout=10.0, drain_timeout=7.0, drain_grace=3.0)
    )


def test_workers_get_connections_once_all_are_ready() -> None:
    manager = make()
    assert done(manager.start(0.0)) == [Spawn(FIRST, 0), Spawn(SECOND, 0)]
    manager.report(FIRST, Ready(), 1.0)
    actions = manager.report(SECOND, Ready(), 1.0)
    assert AnnounceReady() in actions
    opened = [each.name for each in actions if isinstance(each, Send) and each.command == AcceptConnections()]
    assert opened == [FIRST, SECOND]


def test_workers_are_announced_and_drained() -> None:
    manager = ready(make())
    actions = manager.signalled(signal.SIGTERM, 10.0)
    assert done(actions) == [Send(FIRST, AnnounceDrain()), Send(SECOND, AnnounceDrain())]
    assert done(manager.tick(13.0)) == [Send(FIRST, Drain()), Send(SECOND, Drain())]
    for name in (FIRST, SECOND):
        manager.exited(name, 0, 14.0)
    assert manager.exit_code == 0


def test_workers_are_replaced_one_by_one() -> None:
    manager = ready(make())
    actions = manager.start_rolling_restart(10.0)
    assert (done(actions), said(actions)) == ([Spawn(THIRD, 0)], ["SIGHUP: replacing 2 workers one by one"])
    assert Send(FIRST, Drain(replaced=True)) in manager.report(THIRD, Ready(), 11.0)


def test_a_late_start_names_no_option_that_gateways_lack() -> None:
    manager = make()
    manager.start(0.0)
    manager.tick(10.0)
    actions = manager.exited(FIRST, -signal.SIGKILL, 10.1)
    assert errors(actions)[0] == "gateway 0 was killed by SIGKILL: not ready within 10 s"


def test_options_that_cannot_be_run_have_their_exit_code() -> None:
    manager = make()
    manager.start(0.0)
    manager.report(FIRST, ProcessFailed(message="--scorers x", fatal=True, usage=True), 1.0)
    manager.exited(FIRST, EXIT_FATAL, 1.0)
    manager.exited(SECOND, -signal.SIGKILL, 1.1)
    assert manager.exit_code == EXIT_USAGE
