from __future__ import annotations

import signal

import pytest

from penstock.exit_codes import EXIT_FAILED, EXIT_FATAL
from penstock.supervisor.children.actions import Action, Kill, ProcessName, Send, Spawn
from penstock.supervisor.children.lifecycle import Phase
from penstock.supervisor.children.process_manager import ProcessManager
from penstock.supervisor.children.restart_policy import FIRST_DELAY_S
from penstock.wire.control import Drain, Heartbeat, ProcessFailed, Ready, Stop
from tests.supervisor.children.managers import (
    ENGINE,
    HANG_S,
    OTHER,
    SERVER,
    STARTUP_S,
    done,
    errors,
    fail_for_good,
    make,
    ready,
    said,
    serving,
    watched,
)


def test_a_start_that_may_work_next_time_is_tried_three_times() -> None:
    fleet = make()
    fleet.start(0.0)
    fleet.report(SERVER, Ready(), 0.0)
    now, epochs = 1.0, []
    for _ in range(2):
        assert done(fleet.exited(ENGINE, -signal.SIGSEGV, now)) == []
        deadline = fleet.next_deadline()
        assert deadline is not None
        now = deadline
        epochs += fleet.tick(now)
    assert epochs == [Spawn(ENGINE, 1), Spawn(ENGINE, 2)]
    actions = fleet.exited(ENGINE, -signal.SIGSEGV, now)
    assert errors(actions) == ["engine 0 was killed by SIGSEGV", "engine 0 keeps failing to start; giving up"]
    assert done(actions) == [Send(SERVER, Stop())]


def test_a_machine_that_refuses_processes_is_a_failed_start() -> None:
    fleet = make()
    fleet.start(0.0)
    actions = fleet.start_failed(ENGINE, "Cannot allocate memory", 0.0)
    assert errors(actions) == ["engine 0 could not be started: Cannot allocate memory"]
    assert fleet.tick(FIRST_DELAY_S) == [Spawn(ENGINE, 1)]


@pytest.mark.parametrize("name", [ENGINE, SERVER])
def test_a_death_is_told_once_with_its_cause_and_answered_by_a_restart(name: ProcessName) -> None:
    fleet = serving()
    fleet.report(name, ProcessFailed(message="CUDA is unhappy", fatal=False), 5.0)
    actions = fleet.exited(name, 1, 5.0)
    assert errors(actions) == [f"{name} ended with exit code 1: CUDA is unhappy"]
    assert done(actions) == []
    assert fleet.tick(5.0 + FIRST_DELAY_S / 2) == []
    assert fleet.tick(5.0 + FIRST_DELAY_S) == [Spawn(name, 1)]
    actions = fleet.report(name, Ready(), 6.0)
    assert said(actions) == [f"{name} is ready again"]
    assert done(actions) == []
    assert fleet.restarts(name) == 1
    # The reason of the first death is not told again at the second.
    assert errors(fleet.exited(name, -signal.SIGSEGV, 7.0)) == [f"{name} was killed by SIGSEGV"]


def test_an_exit_that_nobody_asked_for_is_a_death() -> None:
    assert errors(serving().exited(SERVER, 0, 5.0)) == ["api-server 0 ended with exit code 0"]


def test_a_restart_that_keeps_failing_is_given_up_while_others_serve() -> None:
    fleet = serving(2)
    actions, now = fail_for_good(fleet, SERVER, 5.0)
    assert done(actions) == []
    assert errors(actions)[1:] == [
        "api-server 0 keeps failing to start; giving up",
        "serving goes on without api-server 0, with api-server 1",
    ]
    assert fleet.next_deadline() is None
    assert fleet.phase is Phase.SERVING
    actions, now = fail_for_good(fleet, OTHER, now)
    assert done(actions) == [Send(ENGINE, Stop())]
    fleet.exited(ENGINE, 0, now)
    assert fleet.exit_code == EXIT_FAILED


def test_the_last_of_a_role_that_keeps_failing_drains_and_exits_with_1() -> None:
    fleet = serving(2)
    actions, now = fail_for_good(fleet, ENGINE, 5.0)
    assert done(actions) == [Send(SERVER, Drain()), Send(OTHER, Drain())]
    fleet.exited(SERVER, 0, now)
    fleet.exited(OTHER, 0, now)
    assert fleet.exit_code == EXIT_FAILED


def test_a_restart_that_takes_too_long_is_tried_again() -> None:
    fleet = serving()
    fleet.exited(ENGINE, 1, 5.0)
    fleet.tick(6.0)
    assert done(fleet.tick(6.0 + STARTUP_S)) == [Kill(ENGINE)]
    fleet.exited(ENGINE, -signal.SIGKILL, 107.0)
    assert fleet.phase is Phase.SERVING
    assert done(fleet.tick(110.0)) == [Spawn(ENGINE, 2)]


def test_the_coordinator_is_started_first_and_is_not_needed_for_serving() -> None:
    coordinator = ProcessName("coordinator", 0)
    fleet = make(coordinator=True)
    assert fleet.start(0.0) == [Spawn(coordinator, 0), Spawn(ENGINE, 0), Spawn(SERVER, 0)]
    for name in fleet.names():
        fleet.report(name, Ready(), 1.0)
    now = 1.0
    while not (said_now := errors(fleet.exited(coordinator, 1, now)))[-1].startswith("serving goes on"):
        assert fleet.phase is Phase.SERVING
        deadline = fleet.next_deadline()
        assert deadline is not None, said_now
        now = deadline
        fleet.tick(now)
    assert fleet.phase is Phase.SERVING


def test_an_engine_that_is_refused_is_not_tried_again() -> None:
    fleet = ready(make(0, engines=2, first_rank=2, all_engines=4))  # for another host's API servers
    first, second = fleet.names()
    fleet.report(first, ProcessFailed(message="the fleet does not take this engine", fatal=True), 2.0)
    assert "serving goes on without engine 2, with engine 3" in errors(fleet.exited(first, EXIT_FATAL, 2.0))
    fleet.report(second, ProcessFailed(message="the fleet does not take this engine", fatal=True), 3.0)
    fleet.exited(second, EXIT_FATAL, 3.0)
    assert fleet.exit_code == EXIT_FAILED


# -- engines in lock-step ----------------------------------------------------------------------------

GROUP = [ProcessName("engine", rank) for rank in range(3)]


def fall(fleet: ProcessManager, first: ProcessName, now: float) -> list[Action]:
    """One dies, and the others are killed; what the last death leads to."""
    others = [name for name in GROUP if name != first]
    assert done(fleet.exited(first, -signal.SIGSEGV, now)) == [Kill(name) for name in others]
    assert fleet.exited(others[0], -signal.SIGKILL, now) == []
    return fleet.exited(others[1], -signal.SIGKILL, now)


def test_engines_in_lock_step_fall_and_are_started_again_together() -> None:
    fleet = serving(group=3)
    actions = fleet.exited(GROUP[1], -signal.SIGSEGV, 5.0)
    assert done(actions) == [Kill(GROUP[0]), Kill(GROUP[2])]
    assert errors(actions) == ["engine 1 was killed by SIGSEGV"]
    assert fleet.exited(GROUP[0], -signal.SIGKILL, 5.1) == []
    fleet.report(GROUP[2], ProcessFailed(message="the others have left", fatal=True), 5.1)
    actions = fleet.exited(GROUP[2], 1, 5.2)
    assert said(actions) == ["the group of engine 0, engine 1, engine 2 is started again in 0.1 s"]
    assert fleet.tick(5.2 + FIRST_DELAY_S) == [Spawn(name, 1) for name in GROUP]
    for name in GROUP:
        fleet.report(name, Ready(), 6.0)
    fall(fleet, GROUP[0], 6.5)
    assert fleet.next_deadline() == 6.5 + 2 * FIRST_DELAY_S
    assert fleet.phase is Phase.SERVING


def test_a_group_of_which_one_never_gets_ready_is_given_up() -> None:
    fleet = serving(group=3)
    fall(fleet, GROUP[0], 5.0)
    now = 5.0
    for _ in range(3):
        now += 40.0
        assert done(fleet.tick(now)) == [Spawn(name, fleet_epoch(now)) for name in GROUP]
        fleet.report(GROUP[0], Ready(), now)
        fleet.report(GROUP[1], Ready(), now)
        actions = fall(fleet, GROUP[2], now)
    assert "the group of engine 0, engine 1, engine 2 keeps failing to start; giving up" in errors(actions)
    assert done(actions) == [Send(SERVER, Drain())]


def fleet_epoch(now: float) -> int:
    """Of a group that falls every 40 seconds from 5 on."""
    return int((now - 5.0) / 40.0)


def test_a_rank_that_would_fail_again_ends_the_server_when_its_group_is_gone() -> None:
    fleet = make(group=3)
    fleet.start(0.0)
    fleet.report(SERVER, Ready(), 0.5)
    fleet.report(GROUP[2], ProcessFailed(message="no config.json", fatal=True), 1.0)
    assert errors(fleet.exited(GROUP[2], EXIT_FATAL, 1.0)) == [
        "engine 2 ended with exit code 3: no config.json"
    ]
    fleet.exited(GROUP[0], -signal.SIGKILL, 1.0)
    assert done(fleet.exited(GROUP[1], -signal.SIGKILL, 1.0)) == [Send(SERVER, Stop())]
    fleet.exited(SERVER, 0, 1.0)
    assert fleet.exit_code == EXIT_FAILED


def test_a_rank_that_hangs_takes_its_group_along() -> None:
    fleet = serving(hang_timeout=HANG_S, group=3)
    for name in GROUP[:2]:
        fleet.report(name, Heartbeat(), 15.0)
    assert done(watched(fleet, 1.0, 1.0 + HANG_S)) == [Kill(GROUP[2])]
    assert "not heard of for 20 s" in errors(fall_of_killed(fleet, GROUP[2], 22.0))[0]


def test_ranks_that_wait_for_one_that_hangs_are_not_blamed() -> None:
    """They wait within a step, and fall silent with it; which was heard of first says nothing."""
    fleet = serving(hang_timeout=HANG_S, group=3)
    fleet.report(GROUP[1], Heartbeat(), 1.5)
    fleet.report(GROUP[2], Heartbeat(), 14.0)
    assert done(watched(fleet, 1.0, 1.0 + HANG_S)) == [Kill(GROUP[0])]
    assert done(fleet.tick(1.5 + HANG_S)) == []  # it falls with the other one
    [error] = errors(fall_of_killed(fleet, GROUP[0], 22.0))
    assert error.endswith(
        "not heard of for 20 s (--engine-hang-timeout), and engine 1 hardly less: "
        "one of them hangs, the others may wait for it"
    )


def fall_of_killed(fleet: ProcessManager, name: ProcessName, now: float) -> list[Action]:
    actions = fleet.exited(name, -signal.SIGKILL, now)
    assert done(actions) == [Kill(other) for other in GROUP if other != name]
    return actions


def test_ranks_that_die_at_the_same_time_are_each_told_and_killed_once() -> None:
    fleet = serving(group=3)
    assert done(fleet.protocol_error(GROUP[0], "nonsense", 5.0)) == [Kill(GROUP[0])]
    assert done(fleet.exited(GROUP[1], -signal.SIGSEGV, 5.0)) == [Kill(GROUP[2])]
    assert len(errors(fleet.exited(GROUP[0], -signal.SIGKILL, 5.0))) == 1
    assert done(fleet.exited(GROUP[2], -signal.SIGKILL, 5.0)) == []
    assert fleet.tick(6.0) == [Spawn(name, 1) for name in GROUP]


def test_a_group_that_the_machine_refuses_in_part_is_tried_again_as_a_whole() -> None:
    fleet = make(group=3)
    fleet.start(0.0)
    assert done(fleet.start_failed(GROUP[0], "no memory", 0.0)) == [Kill(GROUP[1]), Kill(GROUP[2])]
    assert done(fleet.start_failed(GROUP[1], "no memory", 0.0)) == []
    fleet.exited(GROUP[2], -signal.SIGKILL, 0.1)
    assert fleet.tick(1.0) == [Spawn(name, 1) for name in GROUP]
