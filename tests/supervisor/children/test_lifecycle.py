from __future__ import annotations

import signal

import pytest

from penstock.exit_codes import EXIT_OK
from penstock.supervisor.children.actions import Kill, ProcessName, Send, Spawn
from penstock.supervisor.children.child_state import EXIT_GRACE_S
from penstock.supervisor.children.restart_policy import FIRST_DELAY_S
from penstock.wire.control import Drain, Ready, Stop
from tests.supervisor.children.managers import (
    DRAIN_S,
    ENGINE,
    OTHER,
    SERVER,
    done,
    errors,
    make,
    ready,
    said,
    serving,
)


def test_a_signal_during_the_start_stops_at_once() -> None:
    manager = make()
    manager.start(0.0)
    manager.report(SERVER, Ready(), 0.5)
    assert done(manager.signalled(signal.SIGINT, 1.0)) == [Kill(ENGINE), Send(SERVER, Stop())]
    assert errors(manager.exited(ENGINE, -signal.SIGKILL, 1.0)) == []
    manager.exited(SERVER, 0, 1.0)
    assert manager.exit_code == EXIT_OK


def test_a_signal_drains_api_servers_then_stops_engines_and_exits_with_0() -> None:
    manager = serving(2)
    actions = manager.signalled(signal.SIGTERM, 10.0)
    assert done(actions) == [Send(SERVER, Drain()), Send(OTHER, Drain())]
    assert said(actions) == ["SIGTERM: shutting down, finishing running streams for up to 7 s"]
    assert manager.exited(OTHER, 0, 11.0) == []
    assert manager.exited(SERVER, 0, 12.0) == [Send(ENGINE, Stop())]
    assert manager.exit_code is None
    assert manager.exited(ENGINE, 0, 12.1) == []
    assert manager.exit_code == EXIT_OK
    assert manager.next_deadline() is None


def test_streams_that_run_too_long_are_stopped_and_then_killed() -> None:
    manager = serving()
    manager.signalled(signal.SIGTERM, 10.0)
    assert manager.tick(10.0 + DRAIN_S - 0.1) == []
    actions = manager.tick(10.0 + DRAIN_S)
    assert done(actions) == [Send(ENGINE, Stop()), Send(SERVER, Stop())]
    assert len(errors(actions)) == 1
    manager.exited(ENGINE, 0, 17.5)
    actions = manager.tick(10.0 + DRAIN_S + EXIT_GRACE_S)
    assert done(actions) == [Kill(SERVER)]
    assert errors(actions) == ["killing what has not ended: api-server 0"]
    manager.exited(SERVER, -signal.SIGKILL, 22.5)
    assert manager.exit_code == EXIT_OK


@pytest.mark.parametrize(("second", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_ends_streams_truthfully_and_a_third_kills(second: signal.Signals, code: int) -> None:
    manager = serving()
    manager.signalled(signal.SIGTERM, 10.0)
    actions = manager.signalled(second, 10.5)
    assert done(actions) == [Send(ENGINE, Stop()), Send(SERVER, Stop())]
    assert errors(actions) == [f"{second.name} while shutting down: running streams end with an error"]
    assert manager.signalled(second, 10.5) == []
    assert done(manager.signalled(signal.SIGINT, 11.0)) == [Kill(ENGINE), Kill(SERVER)]
    manager.exited(ENGINE, -signal.SIGKILL, 11.1)
    assert errors(manager.exited(SERVER, -signal.SIGKILL, 11.1)) == []
    assert manager.exit_code == code


@pytest.mark.parametrize(("second", "at"), [(signal.SIGINT, 10.05), (signal.SIGHUP, 11.0)])
def test_an_echo_of_the_first_signal_is_none(second: signal.Signals, at: float) -> None:
    manager = serving()
    manager.signalled(signal.SIGINT, 10.0)
    assert manager.signalled(second, at) == []


def test_deaths_during_the_drain_are_told_and_not_answered() -> None:
    manager = serving(2)
    manager.signalled(signal.SIGTERM, 10.0)
    actions = manager.exited(SERVER, -signal.SIGSEGV, 10.5)
    assert errors(actions) == ["api-server 0 was killed by SIGSEGV while shutting down"]
    assert done(actions) == []
    manager.exited(OTHER, 0, 11.0)
    manager.exited(ENGINE, 0, 11.0)
    assert manager.exit_code == EXIT_OK


def test_a_child_that_waits_for_its_restart_is_not_started_during_the_drain() -> None:
    manager = serving(2)
    manager.exited(SERVER, 1, 9.99)
    assert done(manager.signalled(signal.SIGTERM, 10.0)) == [Send(OTHER, Drain())]
    assert manager.tick(10.0 + FIRST_DELAY_S) == []


def test_a_child_that_is_starting_again_is_killed_by_the_drain() -> None:
    manager = serving(2)
    manager.exited(ENGINE, 1, 9.0)
    assert done(manager.tick(9.9)) == [Spawn(ENGINE, 1)]
    assert done(manager.signalled(signal.SIGTERM, 10.0)) == [
        Kill(ENGINE),
        Send(SERVER, Drain()),
        Send(OTHER, Drain()),
    ]


def test_a_host_without_api_servers_drains_its_engines() -> None:
    manager = ready(make(0, engines=2, first_rank=2, all_engines=4))
    assert manager.names() == [ProcessName("engine", 2), ProcessName("engine", 3)]
    first, second = manager.names()
    assert done(manager.signalled(signal.SIGTERM, 2.0)) == [Send(first, Drain()), Send(second, Drain())]
    assert done(manager.exited(first, EXIT_OK, 3.0)) == []
    assert done(manager.tick(2.0 + DRAIN_S)) == [Send(second, Stop())]
    manager.exited(second, EXIT_OK, 10.0)
    assert manager.exit_code == EXIT_OK
