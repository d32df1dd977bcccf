from __future__ import annotations

import signal

from penstock.exit_codes import EXIT_FATAL
from penstock.supervisor.children.actions import NothingReplaced, ProcessName, ReplaceAgain, Send, Spawn
from penstock.wire.control import Drain, Ready, Stop
from tests.supervisor.children.managers import (
    ENGINE,
    OTHER,
    SERVER,
    done,
    errors,
    fail_for_good,
    make,
    said,
    serving,
)

NEW = ProcessName("api-server", 2)
RETIRE = Drain(replaced=True)


def test_api_servers_are_replaced_one_by_one() -> None:
    manager = serving(2)
    actions = manager.start_rolling_restart(10.0)
    assert done(actions) == [Spawn(NEW, 0)]
    assert said(actions) == ["SIGHUP: replacing 2 API servers one by one"]
    third = ProcessName("api-server", 3)
    actions = manager.report(NEW, Ready(), 12.0)
    assert done(actions) == [Send(SERVER, RETIRE), Spawn(third, 0)]
    assert said(actions) == ["api-server 2 is ready and replaces api-server 0"]
    assert done(manager.report(third, Ready(), 14.0)) == [Send(OTHER, RETIRE)]
    assert manager.next_deadline() is None  # their streams may take any time
    assert said(manager.exited(SERVER, 0, 500.0)) == ["api-server 0 has served all it had"]
    actions = manager.exited(OTHER, -signal.SIGSEGV, 501.0)
    assert errors(actions) == ["api-server 1 was killed by SIGSEGV before it had served all it had"]
    assert done(actions) == []
    # Free numbers are used again, with epochs of their own.
    assert done(manager.start_rolling_restart(600.0)) == [Spawn(SERVER, 1)]
    assert manager.restarts(SERVER) == 0


def test_a_replacement_that_fails_changes_nothing() -> None:
    manager = serving(2)
    manager.start_rolling_restart(10.0)
    actions = manager.exited(NEW, EXIT_FATAL, 11.0)
    assert done(actions) == [NothingReplaced()]
    assert errors(actions)[1] == "api-server 0 goes on; the rolling restart ends"
    assert manager.next_deadline() is None
    assert done(manager.start_rolling_restart(20.0)) == [Spawn(NEW, 1)]


def test_a_later_replacement_that_fails_ends_the_restart() -> None:
    manager = serving(2)
    manager.start_rolling_restart(10.0)
    manager.report(NEW, Ready(), 11.0)
    actions = manager.exited(ProcessName("api-server", 3), EXIT_FATAL, 12.0)
    assert done(actions) == []
    assert errors(actions)[1] == "api-server 1 goes on; the rolling restart ends"


def test_an_api_server_that_dies_before_its_replacement_is_ready_is_not_started_again() -> None:
    manager = serving(2)
    manager.start_rolling_restart(10.0)
    third = ProcessName("api-server", 3)
    assert done(manager.exited(SERVER, 1, 11.0)) == [
        Spawn(third, 0)
    ]  # the next replacement, of the other one
    assert done(manager.report(NEW, Ready(), 12.0)) == []
    assert done(manager.report(third, Ready(), 12.0)) == [Send(OTHER, RETIRE)]


def test_sighup_while_starting_is_carried_out_after_the_start() -> None:
    manager = make(2)
    manager.start(0.0)
    for now in (0.1, 0.2):
        actions = manager.start_rolling_restart(now)
        assert errors(actions) == ["SIGHUP while starting: API servers are replaced after that"]
        assert done(actions) == []
    for name in (SERVER, OTHER):
        assert ReplaceAgain() not in manager.report(name, Ready(), 1.0)
    assert manager.report(ENGINE, Ready(), 2.0)[-1] == ReplaceAgain()
    assert done(manager.start_rolling_restart(2.0)) == [Spawn(NEW, 0)]
    assert ReplaceAgain() not in manager.report(NEW, Ready(), 3.0)


def test_only_a_server_that_serves_is_replaced() -> None:
    manager = serving()
    manager.start_rolling_restart(10.0)
    manager.signalled(signal.SIGTERM, 12.0)
    assert done(manager.start_rolling_restart(13.0)) == []


def test_sighup_while_servers_are_replaced_is_carried_out_after_that() -> None:
    manager = serving(2)
    third = ProcessName("api-server", 3)
    manager.start_rolling_restart(10.0)
    for now in (11.0, 11.5):
        actions = manager.start_rolling_restart(now)
        assert errors(actions) == ["SIGHUP while replacing API servers: they are replaced again after that"]
        assert done(actions) == []  # one at a time
    assert done(manager.report(NEW, Ready(), 12.0)) == [Send(SERVER, RETIRE), Spawn(third, 0)]
    assert done(manager.report(third, Ready(), 13.0)) == [Send(OTHER, RETIRE), ReplaceAgain()]
    manager.exited(SERVER, 0, 14.0)
    assert done(manager.start_rolling_restart(15.0)) == [Spawn(SERVER, 1)]
    fourth = ProcessName("api-server", 5)
    assert done(manager.report(SERVER, Ready(), 16.0)) == [Send(NEW, RETIRE), Spawn(fourth, 0)]
    assert done(manager.report(fourth, Ready(), 17.0)) == [Send(third, RETIRE)]


def test_sighup_while_a_replacement_fails_is_carried_out() -> None:
    """It may bring what was missing."""
    manager = serving(2)
    manager.start_rolling_restart(10.0)
    manager.start_rolling_restart(11.0)
    assert done(manager.exited(NEW, EXIT_FATAL, 12.0)) == [NothingReplaced(), ReplaceAgain()]


def test_a_server_that_is_starting_when_sighup_comes_is_replaced_too() -> None:
    manager = serving(2)
    manager.exited(SERVER, -signal.SIGKILL, 9.0)
    due = manager.next_deadline()
    assert due is not None
    assert done(manager.tick(due)) == [Spawn(SERVER, 1)]
    third = ProcessName("api-server", 3)
    assert done(manager.start_rolling_restart(due + 0.1)) == [Spawn(third, 0)]
    assert done(manager.report(third, Ready(), due + 1)) == [Send(OTHER, RETIRE)]
    assert done(manager.report(SERVER, Ready(), due + 2)) == [ReplaceAgain()]


def test_the_end_drains_replaced_api_servers_too() -> None:
    manager = serving()
    manager.start_rolling_restart(10.0)
    first = ProcessName("api-server", 1)
    manager.report(first, Ready(), 11.0)
    assert done(manager.signalled(signal.SIGTERM, 12.0)) == [Send(SERVER, Drain()), Send(first, Drain())]
    assert manager.exited(first, 0, 13.0) == []
    assert manager.exited(SERVER, 0, 14.0) == [Send(ENGINE, Stop())]


def test_a_retiring_api_server_does_not_keep_a_fleet_without_others() -> None:
    manager = serving()
    manager.start_rolling_restart(10.0)
    first = ProcessName("api-server", 1)
    manager.report(first, Ready(), 11.0)
    actions, _ = fail_for_good(manager, first, 12.0)
    assert done(actions) == [Send(SERVER, Drain())]
