from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.config.serve import ServeConfig
from penstock.wire.channel import ChildChannel, ChildGone, ControlChannel, SupervisorGone
from penstock.wire.control import (
    MAX_FAILURE_CHARACTERS,
    ChangeState,
    ControlError,
    Drain,
    DrainEngine,
    EnginesDraining,
    Heartbeat,
    Launch,
    ProcessFailed,
    Progress,
    Ready,
    StateReport,
    StatesReport,
    Stop,
    SupervisorMetrics,
    encode,
)
from tests.launches import launch

LAUNCH = launch("api-server")


@pytest.fixture
def ends() -> Iterator[tuple[ChildChannel, ControlChannel]]:
    supervisor, theirs = ChildChannel.pair()
    child = ControlChannel(theirs.detach())
    yield supervisor, child
    supervisor.close()
    child.close()


def test_launch_is_read_first_and_kept(ends: tuple[ChildChannel, ControlChannel]) -> None:
    supervisor, child = ends
    supervisor.send(LAUNCH)
    supervisor.send(Drain())
    assert child.launch == LAUNCH
    assert child.launch is child.launch
    # The drain came in the same read as the launch.
    assert child.receive() == [Drain()]
    assert child.receive() == []


def test_launch_waits_for_the_whole_line() -> None:
    ours, theirs = socket.socketpair()
    child = ControlChannel(theirs.detach())
    line = encode(LAUNCH)
    ours.sendall(line[:100])
    found: list[Launch] = []
    reader = threading.Thread(target=lambda: found.append(child.launch))
    reader.start()
    ours.sendall(line[100:])
    reader.join(timeout=60)
    assert found == [LAUNCH]
    ours.close()
    child.close()


def test_something_else_than_launch_is_refused(ends: tuple[ChildChannel, ControlChannel]) -> None:
    supervisor, child = ends
    supervisor.send(Stop())
    with pytest.raises(ControlError, match="expected Launch, got Stop"):
        _ = child.launch


def test_a_second_launch_is_refused(ends: tuple[ChildChannel, ControlChannel]) -> None:
    supervisor, child = ends
    supervisor.send(LAUNCH)
    assert child.launch == LAUNCH
    supervisor.send(LAUNCH)
    with pytest.raises(ControlError, match="second Launch"):
        child.receive()


def test_reports_arrive_in_order(ends: tuple[ChildChannel, ControlChannel]) -> None:
    supervisor, child = ends
    assert supervisor.receive() == []
    child.progress("weights", 0.25)
    assert not child.reported_ready
    child.ready({"device": "cpu"})
    assert child.reported_ready
    child.failed("gone wrong", fatal=False)
    assert supervisor.receive() == [
        Progress(text="weights", fraction=0.25),
        Ready(info={"device": "cpu"}),
        ProcessFailed(message="gone wrong", fatal=False),
    ]


def test_orders_before_the_end_are_returned_before_it_is_raised(
    ends: tuple[ChildChannel, ControlChannel],
) -> None:
    supervisor, child = ends
    supervisor.send(LAUNCH)
    assert child.launch == LAUNCH
    supervisor.send(Drain())
    supervisor.send(Stop())
    supervisor.close()
    assert child.receive() == [Drain(), Stop()]
    for _ in range(2):
        with pytest.raises(SupervisorGone):
            child.receive()


def test_a_child_without_supervisor_learns_it_from_every_method() -> None:
    for use in (
        lambda child: child.launch,
        lambda child: child.progress("x"),
        lambda child: child.ready(),
        lambda child: child.failed("x", fatal=True),
    ):
        supervisor, theirs = ChildChannel.pair()
        child = ControlChannel(theirs.detach())
        supervisor.close()
        with pytest.raises(SupervisorGone):
            use(child)
        child.close()


def test_reports_before_the_end_of_a_child_are_read(ends: tuple[ChildChannel, ControlChannel]) -> None:
    supervisor, child = ends
    supervisor.send(LAUNCH)  # never read: the kernel tells that as a reset connection
    child.failed("why", fatal=True)
    child.close()
    assert supervisor.receive() == [ProcessFailed(message="why", fatal=True)]
    with pytest.raises(ChildGone):
        supervisor.receive()
    with pytest.raises(ChildGone):
        supervisor.send(Stop())


def received(supervisor: ChildChannel) -> list[object]:
    """All that has arrived."""
    reports: list[object] = []
    while select.select([supervisor], [], [], 0)[0]:
        reports += supervisor.receive()
    return reports


def test_a_child_never_waits_for_its_supervisor(ends: tuple[ChildChannel, ControlChannel]) -> None:
    supervisor, child = ends
    for revision in range(20_000):  # far more than a socket's buffer holds
        child.heartbeat()
        child.drain_engine(revision % 2, draining=revision % 4 < 2)
        child.forward(StatesReport(states={"sleep": StateReport(revision)}))
    child.ready()
    first = received(supervisor)
    assert len(first) < 30_000
    assert Ready() not in first
    child.heartbeat()  # what found no room goes with the next
    rest = received(supervisor)
    assert len(rest) <= 6, "at most one of a kind, and what was sent in part"
    for report in (
        Ready(),
        DrainEngine(rank=1, draining=False),
        StatesReport(states={"sleep": StateReport(19_999)}),
    ):
        assert report in rest


def test_a_supervisor_never_waits_for_a_child_and_keeps_what_counts(
    ends: tuple[ChildChannel, ControlChannel],
) -> None:
    supervisor, child = ends
    supervisor.send(LAUNCH)
    for number in range(3000):
        supervisor.send(SupervisorMetrics(snapshot=b"%5d" % number + b"x" * 500))
        supervisor.send(EnginesDraining(ranks=[number]))
    assert supervisor.unsent
    supervisor.send(Drain())
    supervisor.send(Stop())
    assert child.launch == LAUNCH
    commands = child.receive()
    while supervisor.unsent or select.select([child], [], [], 0)[0]:
        supervisor.flush()
        commands += child.receive()
    assert commands[-2:] == [Drain(), Stop()]
    assert commands[-3] == EnginesDraining(ranks=[2999])
    assert [c for c in commands if isinstance(c, SupervisorMetrics)][-1].snapshot.startswith(b" 2999")


def test_a_launch_longer_than_the_socket_has_room_for_arrives() -> None:
    supervisor, theirs = ChildChannel.pair()
    long = launch("api-server", config=ServeConfig(api_key=["k" * 100] * 8000))
    supervisor.send(long)
    child = ControlChannel(theirs.detach())
    found: list[Launch] = []
    reader = threading.Thread(target=lambda: found.append(child.launch))
    reader.start()
    while supervisor.unsent:
        select.select([], [supervisor], [], 60)
        supervisor.flush()
    reader.join(timeout=60)
    assert found == [long]
    supervisor.close()
    child.close()


def test_a_long_report_is_sent_in_parts(ends: tuple[ChildChannel, ControlChannel]) -> None:
    supervisor, child = ends
    child._stream.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    value = {"text": "x" * 100_000}
    child.forward(ChangeState(name="adapters", key="k", asked="load", base=0, stages=[value]))
    assert child.unsent
    received: list[Any] = []
    while not received:
        received += supervisor.receive()
        child.flush()
    assert not child.unsent
    assert received[0].stages == [value]


def test_a_flood_is_read_in_portions() -> None:
    ours, theirs = socket.socketpair()
    supervisor = ChildChannel(ours)
    theirs.setblocking(False)
    line = encode(Heartbeat()) * 4000
    written = 0
    for _ in range(100):
        with contextlib.suppress(BlockingIOError):
            while True:
                written += theirs.send(line[written % len(line) :])
        assert len(supervisor.receive()) <= (1 << 16) / len(encode(Heartbeat())) + 1
    supervisor.close()
    theirs.close()


def test_a_reason_of_any_length_is_cut_to_what_is_read(ends: tuple[ChildChannel, ControlChannel]) -> None:
    supervisor, child = ends
    child.failed("x" * (2 << 20), fatal=False)
    assert supervisor.receive() == [ProcessFailed(message="x" * MAX_FAILURE_CHARACTERS, fatal=False)]


def test_rubbish_from_a_child_is_named() -> None:
    ours, theirs = socket.socketpair()
    supervisor = ChildChannel(ours)
    theirs.sendall(b"Loading weights...\n")
    with pytest.raises(ControlError, match="Loading weights"):
        supervisor.receive()
    supervisor.close()
    theirs.close()


def test_reports_of_several_threads_do_not_mix(ends: tuple[ChildChannel, ControlChannel]) -> None:
    supervisor, child = ends
    texts = [character * 3000 for character in "abcd"]

    def send(text: str) -> None:
        for _ in range(20):
            child.progress(text)

    threads = [threading.Thread(target=send, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    reports: list[object] = []
    while any(thread.is_alive() for thread in threads) or select.select([supervisor], [], [], 0)[0]:
        reports += supervisor.receive()
    assert reports
    assert {message.text for message in reports if isinstance(message, Progress)} <= set(texts)
