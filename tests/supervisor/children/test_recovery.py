from __future__ import annotations

import signal

import pytest

from penstock.exit_codes import EXIT_FAILED, EXIT_FATAL
from penstock.supervisor.children.actions import Action, Kill, ProcessName, Send, Spawn
from penstock.supervisor.children.lifecycle import Phase
from penstock.supervisor.children.process_manager import ProcessManager
from penstock.supervisor.children.restart_policy import FIRST_DELAY_S, MAX_DELAY_S, MAX_MEDIA_DELAY_S
from penstock.wire.control import Drain, ProcessFailed, Ready, Stop
from tests.supervisor.children.managers import (
    ENGINE,
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
)


def test_a_start_that_may_work_next_time_is_tried_three_times() -> None:
    manager = make()
    manager.start(0.0)
    manager.report(SERVER, Ready(), 0.0)
    now, epochs = 1.0, []
    for _ in range(2):
        assert done(manager.exited(ENGINE, -signal.SIGSEGV, now)) == []
        deadline = manager.next_deadline()
        assert deadline is not None
        now = deadline
        epochs += manager.tick(now)
    assert epochs == [Spawn(ENGINE, 1), Spawn(ENGINE, 2)]
    actions = manager.exited(ENGINE, -signal.SIGSEGV, now)
    assert errors(actions) == ["engine 0 was killed by SIGSEGV", "engine 0 keeps failing to start; giving up"]
    assert done(actions) == [Send(SERVER, Stop())]


def test_a_machine_that_refuses_processes_is_a_failed_start() -> None:
    manager = make()
    manager.start(0.0)
    actions = manager.start_failed(ENGINE, "Cannot allocate memory", 0.0)
    assert errors(actions) == ["engine 0 could not be started: Cannot allocate memory"]
    assert manager.tick(FIRST_DELAY_S) == [Spawn(ENGINE, 1)]


@pytest.mark.parametrize("name", [ENGINE, SERVER])
def test_a_death_is_told_once_with_its_cause_and_answered_by_a_restart(name: ProcessName) -> None:
    manager = serving()
    manager.report(name, ProcessFailed(message="CUDA is unhappy", fatal=False), 5.0)
    actions = manager.exited(name, 1, 5.0)
    assert errors(actions) == [f"{name} ended with exit code 1: CUDA is unhappy"]
    assert done(actions) == []
    assert manager.tick(5.0 + FIRST_DELAY_S / 2) == []
    assert manager.tick(5.0 + FIRST_DELAY_S) == [Spawn(name, 1)]
    actions = manager.report(name, Ready(), 6.0)
    assert said(actions) == [f"{name} is ready again"]
    assert done(actions) == []
    assert manager.restarts(name) == 1
    # The reason of the first death is not told again at the second.
    assert errors(manager.exited(name, -signal.SIGSEGV, 7.0)) == [f"{name} was killed by SIGSEGV"]


def test_an_exit_that_nobody_asked_for_is_a_death() -> None:
    assert errors(serving().exited(SERVER, 0, 5.0)) == ["api-server 0 ended with exit code 0"]


def test_a_restart_that_keeps_failing_is_tried_again_while_others_serve() -> None:
    manager = serving(2)
    actions, now = fail_for_good(manager, SERVER, 5.0)
    text = "api-server 0 keeps failing to start; serving goes on with api-server 1"
    for epoch in range(4, 20):
        assert done(actions) == []
        assert errors(actions)[1:] == [text]
        now += MAX_DELAY_S
        assert done(manager.tick(now)) == [Spawn(SERVER, epoch)]
        actions = manager.exited(SERVER, -signal.SIGKILL, now)
    now += MAX_DELAY_S
    manager.tick(now)
    assert said(manager.report(SERVER, Ready(), now)) == ["api-server 0 is ready again"]
    assert manager.restarts(SERVER) == 20
    assert manager.phase is Phase.SERVING


def test_a_server_of_which_every_one_keeps_failing_ends_with_1() -> None:
    manager = serving(2)
    _, now = fail_for_good(manager, SERVER, 5.0)
    actions, now = fail_for_good(manager, OTHER, now)
    assert errors(actions)[1:] == ["api-server 1 keeps failing to start; giving up"]
    assert done(actions) == [Kill(SERVER)]  # it was starting once more
    assert done(manager.exited(SERVER, -signal.SIGKILL, now)) == [Send(ENGINE, Stop())]
    manager.exited(ENGINE, 0, now)
    assert manager.exit_code == EXIT_FAILED


def test_the_last_of_a_role_that_keeps_failing_drains_and_exits_with_1() -> None:
    manager = serving(2)
    actions, now = fail_for_good(manager, ENGINE, 5.0)
    assert done(actions) == [Send(SERVER, Drain()), Send(OTHER, Drain())]
    manager.exited(SERVER, 0, now)
    manager.exited(OTHER, 0, now)
    assert manager.exit_code == EXIT_FAILED


def test_a_restart_that_takes_too_long_is_tried_again() -> None:
    manager = serving()
    manager.exited(ENGINE, 1, 5.0)
    manager.tick(6.0)
    assert done(manager.tick(6.0 + STARTUP_S)) == [Kill(ENGINE)]
    manager.exited(ENGINE, -signal.SIGKILL, 107.0)
    assert manager.phase is Phase.SERVING
    assert done(manager.tick(110.0)) == [Spawn(ENGINE, 2)]


def test_the_coordinator_is_started_first_and_is_not_needed_for_serving() -> None:
    coordinator = ProcessName("coordinator", 0)
    manager = make(coordinator=True)
    assert manager.start(0.0) == [Spawn(coordinator, 0), Spawn(ENGINE, 0), Spawn(SERVER, 0)]
    for name in manager.names():
        manager.report(name, Ready(), 1.0)
    now = 1.0
    for epoch in range(1, 9):
        actions = manager.exited(coordinator, 1, now)
        assert ("coordinator 0 keeps failing to start; serving goes on" in errors(actions)) == (epoch > 3)
        assert manager.phase is Phase.SERVING
        now += MAX_DELAY_S
        assert done(manager.tick(now)) == [Spawn(coordinator, epoch)]


def test_media_workers_are_awaited_restarted_soon_and_not_needed_for_serving() -> None:
    first, second = (ProcessName("media-worker", index) for index in range(2))
    manager = make(media_workers=2)
    assert manager.start(0.0)[1:3] == [Spawn(first, 0), Spawn(second, 0)]
    for name in (ENGINE, SERVER, first):
        manager.report(name, Ready(), 1.0)
    assert manager.phase is Phase.STARTING
    manager.report(second, Ready(), 1.0)
    now = 1.0
    for death in range(1, 21):
        manager.exited(first, -signal.SIGKILL, now)
        deadline = manager.next_deadline()
        assert deadline is not None
        assert deadline - now <= MAX_MEDIA_DELAY_S + 1e-6
        now = deadline
        assert manager.tick(now) == [Spawn(first, death)]
        manager.report(first, Ready(), now)
    for name in (first, second):
        for _ in range(5):
            actions = manager.exited(name, 1, now)
            now += MAX_DELAY_S
            assert Spawn(name, manager.restarts(name) + 1) in manager.tick(now)
        assert any("keeps failing to start; serving goes on" in text for text in errors(actions))
    assert manager.phase is Phase.SERVING


def test_an_engine_that_is_refused_is_not_tried_again() -> None:
    manager = ready(make(0, engines=2, first_rank=2, all_engines=4))  # for another host's API servers
    first, second = manager.names()
    manager.report(first, ProcessFailed(message="the fleet does not take this engine", fatal=True), 2.0)
    assert "serving goes on without engine 2, with engine 3" in errors(manager.exited(first, EXIT_FATAL, 2.0))
    manager.report(second, ProcessFailed(message="the fleet does not take this engine", fatal=True), 3.0)
    manager.exited(second, EXIT_FATAL, 3.0)
    assert manager.exit_code == EXIT_FAILED


# -- engines in lock-step ----------------------------------------------------------------------------

GROUP = [ProcessName("engine", rank) for rank in range(3)]


def fall(manager: ProcessManager, first: ProcessName, now: float) -> list[Action]:
    """One dies, and the others are killed; what the last death leads to."""
    others = [name for name in GROUP if name != first]
    assert done(manager.exited(first, -signal.SIGSEGV, now)) == [Kill(name) for name in others]
    assert manager.exited(others[0], -signal.SIGKILL, now) == []
    return manager.exited(others[1], -signal.SIGKILL, now)


def test_engines_in_lock_step_fall_and_are_started_again_together() -> None:
    manager = serving(group=3)
    actions = manager.exited(GROUP[1], -signal.SIGSEGV, 5.0)
    assert done(actions) == [Kill(GROUP[0]), Kill(GROUP[2])]
    assert errors(actions) == ["engine 1 was killed by SIGSEGV"]
    assert manager.exited(GROUP[0], -signal.SIGKILL, 5.1) == []
    manager.report(GROUP[2], ProcessFailed(message="the others have left", fatal=True), 5.1)
    actions = manager.exited(GROUP[2], 1, 5.2)
    assert said(actions) == ["the group of engine 0, engine 1, engine 2 is started again in 0.1 s"]
    assert manager.tick(5.2 + FIRST_DELAY_S) == [Spawn(name, 1) for name in GROUP]
    for name in GROUP:
        manager.report(name, Ready(), 6.0)
    fall(manager, GROUP[0], 6.5)
    assert manager.next_deadline() == 6.5 + 2 * FIRST_DELAY_S
    assert manager.phase is Phase.SERVING


def test_a_group_of_which_one_never_gets_ready_is_given_up() -> None:
    manager = serving(group=3)
    fall(manager, GROUP[0], 5.0)
    now = 5.0
    for _ in range(3):
        now += 40.0
        assert done(manager.tick(now)) == [Spawn(name, group_epoch(now)) for name in GROUP]
        manager.report(GROUP[0], Ready(), now)
        manager.report(GROUP[1], Ready(), now)
        actions = fall(manager, GROUP[2], now)
    assert "the group of engine 0, engine 1, engine 2 keeps failing to start; giving up" in errors(actions)
    assert done(actions) == [Send(SERVER, Drain())]


def group_epoch(now: float) -> int:
    """Of a group that falls every 40 seconds from 5 on."""
    return int((now - 5.0) / 40.0)


def test_a_rank_that_would_fail_again_ends_the_server_when_its_group_is_gone() -> None:
    manager = make(group=3)
    manager.start(0.0)
    manager.report(SERVER, Ready(), 0.5)
    manager.report(GROUP[2], ProcessFailed(message="no config.json", fatal=True), 1.0)
    assert errors(manager.exited(GROUP[2], EXIT_FATAL, 1.0)) == [
        "engine 2 ended with exit code 3: no config.json"
    ]
    manager.exited(GROUP[0], -signal.SIGKILL, 1.0)
    assert done(manager.exited(GROUP[1], -signal.SIGKILL, 1.0)) == [Send(SERVER, Stop())]
    manager.exited(SERVER, 0, 1.0)
    assert manager.exit_code == EXIT_FAILED


def test_ranks_that_die_at_the_same_time_are_each_told_and_killed_once() -> None:
    manager = serving(group=3)
    assert done(manager.protocol_error(GROUP[0], "nonsense", 5.0)) == [Kill(GROUP[0])]
    assert done(manager.exited(GROUP[1], -signal.SIGSEGV, 5.0)) == [Kill(GROUP[2])]
    assert len(errors(manager.exited(GROUP[0], -signal.SIGKILL, 5.0))) == 1
    assert done(manager.exited(GROUP[2], -signal.SIGKILL, 5.0)) == []
    assert manager.tick(6.0) == [Spawn(name, 1) for name in GROUP]


def test_a_group_that_the_machine_refuses_in_part_is_tried_again_as_a_whole() -> None:
    manager = make(group=3)
    manager.start(0.0)
    assert done(manager.start_failed(GROUP[0], "no memory", 0.0)) == [Kill(GROUP[1]), Kill(GROUP[2])]
    assert done(manager.start_failed(GROUP[1], "no memory", 0.0)) == []
    manager.exited(GROUP[2], -signal.SIGKILL, 0.1)
    assert manager.tick(1.0) == [Spawn(name, 1) for name in GROUP]


def test_a_restart_that_the_system_refuses_is_tried_until_it_succeeds() -> None:
    """Without descriptors or processes for a while: that is no fault of the engine."""
    manager = serving()
    manager.exited(ENGINE, -signal.SIGKILL, 2.0)
    now = 2.0
    for epoch in range(1, 20):
        now += 40.0
        assert done(manager.tick(now)) == [Spawn(ENGINE, epoch)]
        manager.start_failed(ENGINE, "Too many open files", now)
        assert manager.exit_code is None
    manager.tick(now + 40.0)
    manager.report(ENGINE, Ready(), now + 41.0)
    assert manager.phase is Phase.SERVING
