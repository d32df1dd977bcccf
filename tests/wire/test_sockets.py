"""Engine and API server sockets over real ipc in a directory of the test's own."""

from __future__ import annotations

import itertools
import os
import select
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import zmq

from penstock.wire.parts import PIECE_BYTES, Part
from penstock.wire.sockets import (
    COORDINATOR_SILENCE_S,
    FRAMES_IN_FLIGHT,
    MESSAGES_RECEIVED_AHEAD,
    CoordinatorLink,
    EngineLink,
    PeerGone,
    RouterSocket,
    engine_address,
    engine_identity,
    host_and_port,
    new_incarnation,
    resolve_address,
    server_identity,
    tcp_address,
)

ME = server_identity(3, 1)
DEADLINE_S = 60.0


@pytest.fixture
def engine(run_dir: str, stack: ExitStack) -> RouterSocket:
    socket = RouterSocket(engine_address(run_dir, 0))
    stack.callback(socket.close)
    return socket


@pytest.fixture
def link_to(run_dir: str, stack: ExitStack) -> Callable[[bytes], EngineLink]:
    def connect(identity: bytes) -> EngineLink:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        link = EngineLink(context, engine_address(run_dir, 0), identity)
        stack.callback(context.term)
        stack.callback(link.close)
        return link

    return connect


@pytest.fixture
def link(link_to: Callable[[bytes], EngineLink]) -> EngineLink:
    return link_to(ME)


def take(engine: RouterSocket) -> tuple[bytes, list[Part]]:
    assert engine.wait(DEADLINE_S)
    message = engine.receive()
    assert message is not None
    return message


def read(link: EngineLink) -> list[bytes]:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        parts = link.receive()
        if parts is not None:
            return parts
        select.select([link.fd], [], [], 0.05)
    raise AssertionError("nothing to receive")


def meet(engine: RouterSocket, link: EngineLink) -> None:
    """Exchange a first message: an engine knows its peers from theirs."""
    link.send([b"hello"])
    assert take(engine)[1] == [b"hello"]


def until(condition: Callable[[], bool], wait: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        wait()


def test_identities_tell_restarts_apart() -> None:
    assert server_identity(3, 1, 0x2A, 7) == b"api-server-3-1-2a-7"
    assert engine_identity(3, 1, 0x2A) == b"engine-3-1-2a"
    numbers = list(itertools.product(range(2), repeat=4))
    assert len({server_identity(*each) for each in numbers}) == len(numbers)


def test_incarnations_tell_runs_of_a_supervisor_apart() -> None:
    numbers = [new_incarnation() for _ in range(3)]
    assert len(set(numbers)) == 3
    assert all(0 < number < 1 << 63 for number in numbers)


def test_addresses_between_hosts() -> None:
    assert host_and_port("tcp://10.0.0.1:5000") == ("10.0.0.1", 5000)
    assert host_and_port("tcp://[fe80::1%eth0]:5000") == ("fe80::1%eth0", 5000)
    assert host_and_port("ipc:///run/engine-0") is None
    assert resolve_address("tcp://127.0.0.1:5000") == "tcp://127.0.0.1:5000"
    assert resolve_address("tcp://localhost:5000") in ("tcp://127.0.0.1:5000", "tcp://[::1]:5000")
    assert resolve_address("tcp://*:5000") == "tcp://*:5000"
    with pytest.raises(socket.gaierror):
        resolve_address("tcp://no-such-host.invalid:5000")
    assert tcp_address("::1", 5) == "tcp://[::1]:5"
    assert tcp_address("head", "*") == "tcp://head:*"


def test_round_trip(engine: RouterSocket, link: EngineLink) -> None:
    link.send([b"one", b"", b"\x00\xff"])
    assert take(engine) == (ME, [b"one", b"", b"\x00\xff"])
    assert engine.send(ME, [b"header", b"columns"])
    assert read(link) == [b"header", b"columns"]
    assert engine.receive() is None
    assert link.receive() is None


@pytest.mark.parametrize("length", [PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
def test_on_one_host_a_long_part_is_sent_whole_and_not_copied(
    engine: RouterSocket, link: EngineLink, length: int
) -> None:
    parts = [b"head", bytes(length), b"", b"a" * length, b"tail"]
    link.send(parts)
    peer, received = take(engine)
    assert (peer, list(map(bytes, received))) == (ME, parts)
    whole = isinstance(received[1], memoryview)
    assert whole == (length > PIECE_BYTES)
    assert isinstance(received[0], bytes)
    assert isinstance(received[-1], bytes)
    assert engine.send(ME, parts)
    assert read(link) == parts


def test_what_is_sent_before_the_connection_is_made_arrives(engine: RouterSocket, link: EngineLink) -> None:
    link.send([b"early"])
    assert take(engine) == (ME, [b"early"])
    assert not link.lost()


def test_a_link_to_nobody_is_lost_for_good(run_dir: str, link: EngineLink, stack: ExitStack) -> None:
    link.send([b"early"])
    until(link.lost, lambda: select.select([link.monitor_fd], [], [], 0.05))
    engine = RouterSocket(engine_address(run_dir, 0))
    stack.callback(engine.close)
    assert not engine.wait(0.2)


def test_wait_gives_up(engine: RouterSocket) -> None:
    assert not engine.wait(0)


def test_wait_also_for_a_descriptor(engine: RouterSocket) -> None:
    readable, writable = os.pipe()
    try:
        assert not engine.wait(0, readable)
        os.write(writable, b"x")
        assert engine.wait(None, readable)
    finally:
        os.close(readable)
        os.close(writable)


def test_a_reader_that_stops_fills_a_bounded_queue(engine: RouterSocket, link: EngineLink) -> None:
    meet(engine, link)
    payload = bytes(100_000)
    sent = 0
    while engine.send(ME, [b"%d" % sent, payload]):
        sent += 1
        # both ends' queues, and what the kernel holds between them
        assert sent < 4 * FRAMES_IN_FLIGHT
    for number in range(sent):
        assert read(link) == [b"%d" % number, payload]
    until(lambda: engine.send(ME, [b"more"]), lambda: engine.wait(0.01))
    assert read(link) == [b"more"]


def test_an_engine_that_does_not_read_leaves_messages_with_their_sender(
    engine: RouterSocket, run_dir: str, stack: ExitStack
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sender = context.socket(zmq.DEALER)
    stack.callback(context.term)
    stack.callback(sender.close)
    sender.setsockopt(zmq.SNDHWM, 1)
    sender.setsockopt(zmq.LINGER, 0)
    sender.connect(engine_address(run_dir, 0))
    sent = 0
    while sender.poll(500, zmq.POLLOUT):
        sender.send(b"x" * 8192)
        sent += 1
        assert sent < 2 * MESSAGES_RECEIVED_AHEAD, "the engine takes all"
    assert sent >= MESSAGES_RECEIVED_AHEAD
    assert [len(take(engine)[1][0]) for _ in range(sent)] == [8192] * sent


def test_nothing_is_sent_to_an_unknown_peer(engine: RouterSocket) -> None:
    with pytest.raises(PeerGone, match="api-server-3-1"):
        engine.send(ME, [b"x"])


def test_a_peer_that_left_is_gone(engine: RouterSocket, link_to: Callable[[bytes], EngineLink]) -> None:
    link = link_to(ME)
    meet(engine, link)
    link.close()

    def gone() -> bool:
        try:
            engine.send(ME, [b"x"])
        except PeerGone:
            return True
        return False

    until(gone, lambda: engine.wait(0.01))


def test_a_full_peer_that_leaves_is_gone(engine: RouterSocket, link: EngineLink) -> None:
    meet(engine, link)
    while engine.send(ME, [bytes(100_000)]):
        pass
    link.close()
    with pytest.raises(PeerGone):
        until(lambda: False, lambda: (engine.send(ME, [bytes(100_000)]), engine.wait(0.01)))


def test_an_engine_that_left_is_lost_for_good(
    run_dir: str, engine: RouterSocket, link: EngineLink, stack: ExitStack
) -> None:
    meet(engine, link)
    assert not link.lost()
    engine.close()
    until(link.lost, lambda: select.select([link.monitor_fd], [], [], 0.05))
    successor = RouterSocket(engine_address(run_dir, 0))
    stack.callback(successor.close)
    assert link.lost()


def test_a_second_connection_under_an_identity_is_left_alone(
    engine: RouterSocket, link: EngineLink, link_to: Callable[[bytes], EngineLink]
) -> None:
    meet(engine, link)
    second = link_to(ME)
    second.send([b"hello"])
    other = link_to(server_identity(4, 1))  # by then the second one has been there
    meet(engine, other)
    assert engine.send(ME, [b"for the first"])
    assert read(link) == [b"for the first"]
    assert second.receive() is None
    assert engine.receive() is None


def test_a_member_that_connects_again_takes_its_former_connections_place(
    run_dir: str, stack: ExitStack, link_to: Callable[[bytes], EngineLink]
) -> None:
    coordinator = RouterSocket(engine_address(run_dir, 0), reconnecting=True)
    stack.callback(coordinator.close)
    link = link_to(ME)
    meet(coordinator, link)
    second = link_to(ME)
    meet(coordinator, second)
    assert coordinator.send(ME, [b"for the second"])
    assert read(second) == [b"for the second"]
    assert link.receive() is None


def test_a_member_whose_identity_was_taken_connects_again(run_dir: str, stack: ExitStack) -> None:
    address = engine_address(run_dir, 0)
    coordinator = RouterSocket(address, reconnecting=True)
    stack.callback(coordinator.close)
    first = CoordinatorLink(address, ME)
    stack.callback(first.close)
    first.send(b"join")
    assert take(coordinator) == (ME, [b"join"])
    second = CoordinatorLink(address, ME)
    stack.callback(second.close)
    second.send(b"join")
    assert take(coordinator) == (ME, [b"join"])
    now = time.monotonic()
    first.reconnect_if_silent(now)
    first.send(b"nobody reads this")
    assert not coordinator.wait(0.2)
    first.reconnect_if_silent(now + COORDINATOR_SILENCE_S + 1)
    first.send(b"join again")
    assert take(coordinator) == (ME, [b"join again"])
    assert coordinator.send(ME, [b"accepted"])
    assert first.wait(DEADLINE_S)
    assert first.receive() == b"accepted"


def test_peers_do_not_share_a_queue(
    engine: RouterSocket, link: EngineLink, link_to: Callable[[bytes], EngineLink]
) -> None:
    other = link_to(server_identity(4, 0))
    meet(engine, link)
    meet(engine, other)
    while engine.send(ME, [bytes(100_000)]):
        pass
    assert engine.send(server_identity(4, 0), [b"not held up"])
    assert read(other) == [b"not held up"]


def test_an_address_that_cannot_be_bound(run_dir: str) -> None:
    with pytest.raises(zmq.ZMQError):
        RouterSocket(engine_address(run_dir + "/absent", 0))


def test_what_an_engine_sent_before_it_went_is_read(engine: RouterSocket, link: EngineLink) -> None:
    meet(engine, link)
    for number in range(FRAMES_IN_FLIGHT // 2):
        assert engine.send(ME, [b"%d" % number])
    engine.close()
    until(link.lost, lambda: select.select([link.monitor_fd], [], [], 0.05))
    assert [link.receive() for _ in range(FRAMES_IN_FLIGHT // 2)] == [
        [b"%d" % number] for number in range(FRAMES_IN_FLIGHT // 2)
    ]
