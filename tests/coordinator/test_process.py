"""The coordinator over real sockets."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from penstock.coordinator.process import REPORT_INTERVAL_S, Coordinator, CoordinatorMetrics
from penstock.coordinator.state import CoordinatorState
from penstock.metrics.gc_policy import GcPauses
from penstock.metrics.snapshot import decode_snapshot
from penstock.wire.coordination import (
    COORDINATOR_PROTOCOL_VERSION,
    ENGINE_TRAITS,
    EngineJoin,
    EngineReport,
    FleetLoad,
    FromCoordinator,
    JoinAccepted,
    ProcessMetrics,
    Rejoin,
    ServerJoin,
    decode_from_coordinator,
)
from penstock.wire.messages import encode
from penstock.wire.sockets import (
    CoordinatorLink,
    RouterSocket,
    coordinator_address,
    engine_identity,
    server_identity,
)
from tests.launches import launch

WAIT_S = 90.0
JOIN = encode(EngineJoin(COORDINATOR_PROTOCOL_VERSION, 0, 0, traits=dict.fromkeys(ENGINE_TRAITS, "x")))


class Fleet:
    """A coordinator, one engine and one API server."""

    def __init__(self, address: str, stack: ExitStack) -> None:
        self.address = address
        self.socket = RouterSocket(address)
        stack.callback(lambda: self.socket.close())
        self.board = CoordinatorState(local_ranks=frozenset((0,)))
        self.coordinator = Coordinator(self.socket, self.board)
        self.engine = CoordinatorLink(address, engine_identity(0, 0))
        stack.callback(self.engine.close)
        self.server = CoordinatorLink(address, server_identity(0, 0))
        stack.callback(self.server.close)

    def restart(self) -> None:
        self.socket.close()
        self.socket = RouterSocket(self.address)
        self.coordinator = Coordinator(self.socket, CoordinatorState())

    def next_for(self, link: CoordinatorLink) -> FromCoordinator:
        """Run the coordinator until ``link`` gets a message."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            due = self.coordinator.run_once(time.monotonic())
            part = link.receive()
            if part is not None:
                return decode_from_coordinator(part)
            self.socket.wait(min(0.01, due or 0.01))
        raise AssertionError("no message")


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-"))
        yield Fleet(coordinator_address(directory), stack)


def test_reports_reach_api_servers(fleet: Fleet) -> None:
    fleet.server.send(encode(ServerJoin(COORDINATOR_PROTOCOL_VERSION, 0, 0)))
    assert fleet.next_for(fleet.server) == JoinAccepted()
    fleet.engine.send(JOIN)
    fleet.engine.send(encode(EngineReport(1, 2, 3, 0.25, [0, 5])))
    news = fleet.next_for(fleet.server)
    assert isinstance(news, FleetLoad)
    assert [engine.accepted for engine in news.engines] == [5]


def test_a_restarted_coordinator_asks_members_to_join_again(fleet: Fleet) -> None:
    fleet.server.send(encode(ServerJoin(COORDINATOR_PROTOCOL_VERSION, 0, 0)))
    fleet.next_for(fleet.server)
    fleet.restart()
    fleet.engine.send(encode(EngineReport(1, 2, 3, 0.25, [])))
    assert fleet.next_for(fleet.engine) == Rejoin()


def test_nonsense_is_survived(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    fleet.server.send(b"nonsense")
    fleet.server.send(encode(ServerJoin(COORDINATOR_PROTOCOL_VERSION, 0, 0)))
    assert fleet.next_for(fleet.server) == JoinAccepted()
    assert "not a message to a coordinator" in caplog.text


def test_an_api_server_that_is_gone_is_forgotten(fleet: Fleet) -> None:
    late = CoordinatorLink(fleet.address, server_identity(1, 0))
    late.send(encode(ServerJoin(COORDINATOR_PROTOCOL_VERSION, 1, 0)))
    assert fleet.next_for(late) == JoinAccepted()
    late.close()
    fleet.server.send(encode(ServerJoin(COORDINATOR_PROTOCOL_VERSION, 0, 0)))
    fleet.next_for(fleet.server)
    fleet.engine.send(JOIN)
    fleet.engine.send(encode(EngineReport(1, 2, 3, 0.25, [])))
    assert isinstance(fleet.next_for(fleet.server), FleetLoad)


def test_what_it_counts_itself_reaches_api_servers_once_in_a_while(fleet: Fleet) -> None:
    fleet.server.send(encode(ServerJoin(COORDINATOR_PROTOCOL_VERSION, 0, 0)))
    assert fleet.next_for(fleet.server) == JoinAccepted()
    figures = CoordinatorMetrics(launch("coordinator", epoch=2, incarnation=7, restarts=1), GcPauses())
    first = figures.next_report(100.0)
    assert first is not None
    assert figures.next_report(100.0 + REPORT_INTERVAL_S / 2) is None
    second = figures.next_report(100.0 + REPORT_INTERVAL_S)
    assert second is not None
    assert second.sequence > first.sequence
    fleet.board.add_metrics(first)
    told = fleet.next_for(fleet.server)
    assert isinstance(told, ProcessMetrics)
    snapshot = decode_snapshot(told.snapshot)
    assert snapshot.key == ("coordinator 0", 7, 2)
    families = [series.family for series in snapshot.series]
    assert families.count("penstock:process_restarts") == 1
    assert families.count("penstock:gc_pause_seconds") == 3
    assert snapshot.series[0].value == 1
