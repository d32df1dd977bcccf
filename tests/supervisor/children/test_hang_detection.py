from __future__ import annotations

import signal

import pytest

from penstock.supervisor.children.actions import Action, Kill, ProcessName, Spawn
from penstock.supervisor.children.hang_detection import HEARTBEAT_CHECK_INTERVAL_S
from penstock.supervisor.children.process_manager import ProcessManager
from penstock.wire.control import Heartbeat, Ready
from tests.supervisor.children.managers import (
    ENGINE,
    HANG_S,
    SERVER,
    STARTUP_S,
    done,
    errors,
    make,
    serving,
    watched,
)


def test_an_engine_that_falls_silent_is_killed_and_started_again() -> None:
    manager = serving(hang_timeout=HANG_S)
    assert watched(manager, 1.0, 15.0) == []
    assert manager.report(ENGINE, Heartbeat(), 15.0) == []
    assert watched(manager, 15.0, 14.9 + HANG_S) == []
    assert done(manager.tick(15.0 + HANG_S)) == [Kill(ENGINE)]
    [error] = errors(manager.exited(ENGINE, -signal.SIGKILL, 35.0))
    assert "not heard of for 20 s (--engine-hang-timeout)" in error
    assert manager.tick(36.0) == [Spawn(ENGINE, 1)]


@pytest.mark.parametrize("stopped", [HANG_S - 5.0, HANG_S, HANG_S + 0.5, 10 * HANG_S])
def test_time_in_which_the_supervisor_was_stopped_itself_is_nobody_s_silence(stopped: float) -> None:
    manager = serving(hang_timeout=HANG_S)
    assert watched(manager, 1.0, 6.0) == []
    again = 6.0 + stopped
    assert manager.tick(again) == []
    left = 1.0 + HANG_S - 6.0 - HEARTBEAT_CHECK_INTERVAL_S
    assert watched(manager, again, again + left - 0.1) == []
    assert done(watched(manager, again + left - 0.1, again + left + 2 * HEARTBEAT_CHECK_INTERVAL_S)) == [
        Kill(ENGINE)
    ]


def test_a_word_that_came_while_the_supervisor_was_stopped_gives_no_more_than_the_timeout() -> None:
    manager = serving(hang_timeout=HANG_S)
    manager.report(ENGINE, Heartbeat(), 100.0)
    assert manager.tick(100.0) == []
    assert done(watched(manager, 100.0, 100.0 + HANG_S)) == [Kill(ENGINE)]


def test_api_servers_and_starting_engines_need_not_be_heard() -> None:
    manager = make(hang_timeout=HANG_S)
    manager.start(0.0)
    manager.report(SERVER, Ready(), 0.0)
    assert manager.tick(STARTUP_S - 0.1) == []


# -- an expert-parallel group ------------------------------------------------------------------------

GROUP = [ProcessName("engine", rank) for rank in range(3)]


def test_a_rank_that_hangs_takes_its_group_along() -> None:
    manager = serving(hang_timeout=HANG_S, group=3)
    for name in GROUP[:2]:
        manager.report(name, Heartbeat(), 15.0)
    assert done(watched(manager, 1.0, 1.0 + HANG_S)) == [Kill(GROUP[2])]
    assert "not heard of for 20 s" in errors(fall_of_killed(manager, GROUP[2], 22.0))[0]


def test_ranks_that_wait_for_one_that_hangs_are_not_blamed() -> None:
    """They wait within a step, and fall silent with it; which was heard of first says nothing."""
    manager = serving(hang_timeout=HANG_S, group=3)
    manager.report(GROUP[1], Heartbeat(), 1.5)
    manager.report(GROUP[2], Heartbeat(), 14.0)
    assert done(watched(manager, 1.0, 1.0 + HANG_S)) == [Kill(GROUP[0])]
    assert done(manager.tick(1.5 + HANG_S)) == []  # it falls with the other one
    [error] = errors(fall_of_killed(manager, GROUP[0], 22.0))
    assert error.endswith(
        "not heard of for 20 s (--engine-hang-timeout), and engine 1 for nearly as long: "
        "one of them hangs, the others may wait for it"
    )


def fall_of_killed(manager: ProcessManager, name: ProcessName, now: float) -> list[Action]:
    actions = manager.exited(name, -signal.SIGKILL, now)
    assert done(actions) == [Kill(other) for other in GROUP if other != name]
    return actions
