from __future__ import annotations

import signal

import pytest

from penstock.exit_codes import EXIT_FAILED, EXIT_OK
from penstock.supervisor.children.actions import AnnounceReady, Kill, ProcessName, Send, Spawn
from penstock.supervisor.children.child_state import EXIT_GRACE_S
from penstock.supervisor.children.lifecycle import Phase
from penstock.supervisor.children.restart_policy import FIRST_DELAY_S
from penstock.wire.control import AcceptConnections, AnnounceDrain, Drain, Ready, Stop
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


def test_api_servers_take_connections_once_all_children_are_ready() -> None:
    manager = make(2)
    manager.start(0.0)
    for name in (SERVER, OTHER):
        assert Send(name, AcceptConnections()) not in manager.report(name, Ready(), 1.0)
    actions = manager.report(ENGINE, Ready(), 2.0)
    opened = [Send(SERVER, AcceptConnections()), Send(OTHER, AcceptConnections())]
    assert [action for action in actions if action in opened] == opened
    assert actions.index(AnnounceReady()) < actions.index(opened[0])
    manager.exited(OTHER, -signal.SIGKILL, 3.0)
    manager.tick(3.0 + FIRST_DELAY_S)
    assert opened[1] in manager.report(OTHER, Ready(), 4.0)


GRACE_S = 5.0


def test_sigterm_waits_until_load_balancers_have_noticed() -> None:
    manager = ready(make(drain_grace=GRACE_S))
    actions = manager.signalled(signal.SIGTERM, 10.0)
    assert done(actions) == [Send(SERVER, AnnounceDrain())]
    assert said(actions) == ["SIGTERM: /ready answers 503 for 5 s (--drain-grace), then shutting down"]
    assert manager.next_deadline() == 10.0 + GRACE_S
    assert manager.start_rolling_restart(11.0) != []
    assert manager.phase is Phase.LEAVING
    assert done(manager.tick(10.0 + GRACE_S)) == [Send(SERVER, Drain())]
    assert manager.next_deadline() == 10.0 + GRACE_S + DRAIN_S
    assert done(manager.exited(SERVER, 0, 16.0)) == [Send(ENGINE, Stop())]
    manager.exited(ENGINE, 0, 16.1)
    assert manager.exit_code == EXIT_OK


def test_an_api_server_that_dies_in_the_grace_is_replaced_and_told() -> None:
    manager = ready(make(drain_grace=GRACE_S))
    manager.signalled(signal.SIGTERM, 10.0)
    manager.exited(SERVER, -signal.SIGKILL, 10.5)
    assert done(manager.tick(10.5 + FIRST_DELAY_S)) == [Spawn(SERVER, 1)]
    actions = manager.report(SERVER, Ready(), 12.0)
    assert actions.index(Send(SERVER, AcceptConnections())) < actions.index(Send(SERVER, AnnounceDrain()))


@pytest.mark.parametrize(("second", "at"), [(signal.SIGTERM, 11.0), (signal.SIGINT, 11.0)])
def test_a_second_signal_ends_the_grace_alone(second: signal.Signals, at: float) -> None:
    manager = ready(make(drain_grace=GRACE_S))
    manager.signalled(signal.SIGTERM, 10.0)
    assert manager.signalled(second, 10.05) == [], "an echo"
    assert done(manager.signalled(second, at)) == [Send(SERVER, Drain())]
    manager.exited(SERVER, 0, 11.5)
    manager.exited(ENGINE, 0, 11.6)
    assert manager.exit_code == EXIT_OK


def test_ctrl_c_and_hosts_without_clients_have_no_grace() -> None:
    assert done(ready(make(drain_grace=GRACE_S)).signalled(signal.SIGINT, 10.0)) == [Send(SERVER, Drain())]
    headless = ready(make(api_servers=0, drain_grace=GRACE_S))
    assert done(headless.signalled(signal.SIGTERM, 10.0)) == [Send(ENGINE, Drain())]


def test_a_failed_acceptor_drains_and_ends_with_a_failure() -> None:
    manager = ready(make(2, drain_grace=GRACE_S))
    assert done(manager.acceptor_failed(10.0)) == [Send(SERVER, Drain()), Send(OTHER, Drain())]
    for name in (SERVER, OTHER, ENGINE):
        manager.exited(name, 0, 11.0)
    assert manager.exit_code == EXIT_FAILED


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
