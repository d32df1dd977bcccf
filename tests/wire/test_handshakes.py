"""Which connections are closed when there are too many without a key."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from penstock.wire.handshakes import MAX_REFUSAL_BYTES, HandshakeLimit


class Listening:
    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

    def accept(self, source: str) -> tuple[socket.socket, socket.socket]:
        """Both ends of a connection: the peer's and ours."""
        peer = socket.create_connection(self._server.getsockname(), 30, (source, 0))
        return self._stack.enter_context(peer), self._stack.enter_context(self._server.accept()[0])


@pytest.fixture
def listening() -> Iterator[Listening]:
    with ExitStack() as stack:
        yield Listening(stack)


def test_the_oldest_of_the_address_with_most_is_closed(listening: Listening) -> None:
    limit = HandshakeLimit(3)
    single, others = listening.accept("127.0.0.8"), [listening.accept("127.0.0.9") for _ in range(3)]
    for _, ours in (single, *others):
        limit.on_accepted(ours.fileno())
    assert limit.close_excess() == 1
    assert len(limit) == 3
    assert others[0][0].recv(1) == b""
    for peer, _ in (single, *others[1:]):
        peer.setblocking(False)
        with pytest.raises(BlockingIOError):
            peer.recv(1)


def test_a_connection_that_has_ended_its_handshake_is_spared(listening: Listening) -> None:
    limit = HandshakeLimit(1)
    member, stranger = listening.accept("127.0.0.9"), listening.accept("127.0.0.9")
    member[1].sendall(bytes(MAX_REFUSAL_BYTES + 1))
    assert len(member[0].recv(4096)) > MAX_REFUSAL_BYTES
    limit.on_accepted(member[1].fileno())
    limit.on_accepted(stranger[1].fileno())
    assert limit.close_excess() == 0
    assert len(limit) == 1
    member[1].sendall(b"alive")
    assert member[0].recv(5) == b"alive"


def test_a_descriptor_that_another_connection_has_got_is_spared(listening: Listening) -> None:
    limit = HandshakeLimit(0)
    (_, first), (peer, second) = listening.accept("127.0.0.9"), listening.accept("127.0.0.9")
    limit.on_accepted(first.fileno())
    os.dup2(second.fileno(), first.fileno())
    assert limit.close_excess() == 0
    second.sendall(b"alive")
    assert peer.recv(5) == b"alive"


def test_what_has_closed_is_forgotten(listening: Listening) -> None:
    limit = HandshakeLimit(1)
    _, ours = listening.accept("127.0.0.9")
    limit.on_accepted(ours.fileno())
    limit.on_closed(ours.fileno())
    limit.on_closed(ours.fileno())
    assert len(limit) == 0
    number = ours.fileno()
    ours.close()
    limit.on_accepted(number)
    assert len(limit) == 0
