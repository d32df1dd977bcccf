"""Peers without the key: what they can make a listening process hold, and what members notice of it."""

from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import psutil
import pytest
import zmq

from penstock.wire.curve import ClusterKey
from penstock.wire.handshakes import MAX_HANDSHAKES
from penstock.wire.parts import PIECE_BYTES
from penstock.wire.sockets import HANDSHAKE_MS, EngineLink, host_and_port, server_identity

WAIT_S = 90.0
KEY = ClusterKey.generate()
ME = server_identity(0, 0)
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
LISTENER = """
import os, sys
from penstock.wire.curve import ClusterKey
from penstock.wire.sockets import PeerGone, RouterSocket
socket = RouterSocket("tcp://127.0.0.1:*", key=ClusterKey(sys.argv[1]))
print(socket.address, flush=True)
while True:
    socket.wait(None)
    while (message := socket.receive()) is not None:
        try:
            socket.send(*message)
        except PeerGone:
            pass
"""


class Listener:
    """A process that listens over tcp as engines and the coordinator do, and answers each message with the
    same one."""

    def __init__(self, stack: ExitStack) -> None:
        process = stack.enter_context(
            subprocess.Popen([sys.executable, "-c", LISTENER, KEY.secret], stdout=subprocess.PIPE, text=True)
        )
        stack.callback(process.kill)
        assert process.stdout is not None
        self.address = process.stdout.readline().strip()
        self.process = psutil.Process(process.pid)
        self._stack = stack

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        where = host_and_port(self.address)
        return self._stack.enter_context(socket.create_connection(where, WAIT_S, (source, 0)))

    def link(self, identity: bytes = ME) -> EngineLink:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stack.callback(context.term)
        link = EngineLink(context, self.address, identity, KEY)
        self._stack.callback(link.close)
        return link

    @property
    def memory(self) -> int:
        return int(self.process.memory_info().rss)


@pytest.fixture
def listener() -> Iterator[Listener]:
    with ExitStack() as stack:
        yield Listener(stack)


def until(condition: Callable[[], bool], within_s: float = HANDSHAKE_MS / 2000) -> None:
    """``within_s``: by default less than what ends any handshake."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def echoed(link: EngineLink, *parts: bytes) -> None:
    link.send(list(parts))
    deadline = time.monotonic() + WAIT_S
    while (reply := link.receive()) is None:
        assert time.monotonic() < deadline
        select.select([link.fd], [], [], 0.05)
    assert reply == list(parts)


def ended(connection: socket.socket) -> bool:
    """Whether the other side has closed it."""
    try:
        while select.select([connection], [], [], 0)[0]:
            if not connection.recv(4096):
                return True
    except ConnectionError:
        return True
    return False


def pour(connection: socket.socket, most: int) -> int:
    """Sends up to ``most`` bytes; returns how many were taken before the other side closed."""
    sent = 0
    try:
        while sent < most:
            sent += connection.send(bytes(min(1 << 20, most - sent)))
    except ConnectionError:
        pass
    return sent


def test_a_long_frame_before_the_handshake_takes_no_memory(listener: Listener) -> None:
    echoed(listener.link(), b"warm")
    before = listener.memory
    for announced in (1 << 28, 1 << 20):
        strangers = [listener.connect() for _ in range(4)]
        for stranger in strangers:
            stranger.sendall(GREETING + b"\x06" + struct.pack(">Q", announced))
            pour(stranger, min(announced, 64 << 20) - 1)
        assert listener.memory - before < 20 << 20
        for stranger in strangers:
            until(partial(ended, stranger))


def test_connections_without_a_key_are_bounded(listener: Listener) -> None:
    member = listener.link()
    echoed(member, b"warm")
    before, descriptors = listener.memory, listener.process.num_fds()
    size = PIECE_BYTES
    strangers = []
    for _ in range(3 * MAX_HANDSHAKES):
        stranger = listener.connect("127.0.0.9")
        strangers.append(stranger)
        try:
            stranger.sendall(GREETING + b"\x06" + struct.pack(">Q", size))
            stranger.sendall(bytes(size - 1))
        except ConnectionError:
            pass
    until(lambda: listener.process.num_fds() <= descriptors + MAX_HANDSHAKES + 1)
    until(lambda: sum(not ended(each) for each in strangers) <= MAX_HANDSHAKES)
    assert listener.memory - before < 60 << 20
    echoed(member, b"still here")
    echoed(listener.link(server_identity(1, 0)), b"and others may join")
    assert not member.lost()


def test_one_address_does_not_take_the_place_of_another(listener: Listener) -> None:
    early = listener.connect("127.0.0.8")
    early.sendall(GREETING)
    strangers = [listener.connect("127.0.0.9") for _ in range(2 * MAX_HANDSHAKES)]
    until(lambda: sum(not ended(each) for each in strangers) < MAX_HANDSHAKES)
    assert not ended(early)


@pytest.mark.parametrize("size", [0, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 5_000_000])
def test_long_messages_of_members_arrive_whole(listener: Listener, size: int) -> None:
    echoed(listener.link(), b"head", os.urandom(size), b"", os.urandom(size))
