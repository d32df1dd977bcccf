from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from penstock.wire.channel import ChildChannel, ChildGone, ControlChannel, SupervisorGone
from penstock.wire.control import (
    ControlError,
    Drain,
    Heartbeat,
    Launch,
    ProcessFailed,
    Progress,
    Ready,
    Stop,
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


def test_beats_never_wait_for_the_supervisor(ends: tuple[ChildChannel, ControlChannel]) -> None:
    supervisor, child = ends
    for _ in range(20_000):  # far more than a socket's buffer holds
        child.heartbeat()
    reports = supervisor.receive()
    assert 0 < len(reports) < 20_000
    assert set(reports) == {Heartbeat()}
    child.ready()
    assert supervisor.receive() == [Ready()]


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
    received: list[Progress | Ready | ProcessFailed] = []
    with socket.socket(fileno=socket.dup(supervisor.fileno())) as waiting:
        waiting.settimeout(60)
        while len(received) < 80:
            waiting.recv(1, socket.MSG_PEEK)
            received += supervisor.receive()
    for thread in threads:
        thread.join()
    assert {message.text for message in received if isinstance(message, Progress)} == set(texts)
