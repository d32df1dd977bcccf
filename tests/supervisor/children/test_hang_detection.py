from __future__ import annotations

import signal

import pytest

from penstock.supervisor.children.actions import Action, Kill, ProcessName, Spawn
from penstock.supervisor.children.process_manager import MAX_MEDIA_HANG_S, ProcessManager
from penstock.wire.control import Heartbeat, Ready
from tests.supervisor.children.managers import (
    ENGINE,
    HANG_S,
    OTHER,
    SERVER,
    STARTUP_S,
    done,
    errors,
    make,
    ready,
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


@pytest.mark.parametrize("name", [ProcessName("coordinator", 0), SERVER])
def test_an_api_server_or_coordinator_that_falls_silent_is_killed_and_started_again(
    name: ProcessName,
) -> None:
    manager = ready(make(coordinator=True, server_hang_timeout=HANG_S))
    for other in manager.names():
        if other != name:
            manager.report(other, Heartbeat(), 20.0)
    assert done(watched(manager, 1.0, 1.0 + HANG_S)) == [Kill(name)]
    [error] = errors(manager.exited(name, -signal.SIGKILL, 22.0))
    assert "not heard of for 20 s (--api-server-hang-timeout)" in error
    assert manager.tick(23.0) == [Spawn(name, 1)]


def test_a_media_worker_need_not_be_silent_for_as_long() -> None:
    worker = ProcessName("media-worker", 0)
    manager = ready(make(media_workers=1, server_hang_timeout=4 * MAX_MEDIA_HANG_S))
    assert done(watched(manager, 1.0, 0.9 + MAX_MEDIA_HANG_S)) == []
    assert done(manager.tick(1.0 + MAX_MEDIA_HANG_S)) == [Kill(worker)]
    assert "not heard of for 15 s" in errors(manager.exited(worker, -signal.SIGKILL, 17.0))[0]


def test_a_retiring_api_server_that_falls_silent_is_killed() -> None:
    manager = ready(make(server_hang_timeout=HANG_S))
    manager.start_rolling_restart(2.0)
    manager.report(OTHER, Ready(), 3.0)
    manager.report(OTHER, Heartbeat(), 15.0)
    assert done(watched(manager, 3.0, 15.0 + HANG_S - 1)) == [Kill(SERVER)]
    [error] = errors(manager.exited(SERVER, -signal.SIGKILL, 35.0))
    assert "before it had served all it had: not heard of for 20 s" in error


def test_processes_that_start_need_not_be_heard() -> None:
    manager = make(hang_timeout=HANG_S, server_hang_timeout=HANG_S)
    manager.start(0.0)
    assert manager.tick(STARTUP_S - 0.1) == []


def test_without_a_timeout_nobody_need_be_heard() -> None:
    manager = serving()
    assert manager.next_deadline() is None
    assert manager.tick(1e6) == []


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
