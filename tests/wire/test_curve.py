"""Who is let in over tcp, and what becomes of everybody else."""

from __future__ import annotations

import logging
import re
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import zmq

from penstock.wire.curve import HANDSHAKE_FAILURES, ClusterKey
from penstock.wire.sockets import CoordinatorLink, EngineLink, RouterSocket, host_and_port, server_identity

WAIT_S = 90.0
KEY, OTHER = ClusterKey.generate(), ClusterKey.generate()
ME = server_identity(0, 0)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def engine(stack: ExitStack) -> RouterSocket:
    made = RouterSocket("tcp://127.0.0.1:*", key=KEY)
    stack.callback(made.close)
    return made


@pytest.fixture
def link_with(engine: RouterSocket, stack: ExitStack) -> Callable[[ClusterKey], EngineLink]:
    def link_with(key: ClusterKey) -> EngineLink:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(context.term)
        link = EngineLink(context, engine.address, ME, key)
        stack.callback(link.close)
        return link

    return link_with


def meets(engine: RouterSocket, link: EngineLink) -> None:
    link.send([b"hello"])
    assert engine.wait(WAIT_S)
    assert engine.receive() == (ME, [b"hello"])
    assert engine.send(ME, [b"welcome"])
    until(lambda: link.receive() == [b"welcome"])


def test_a_key_is_its_secret() -> None:
    assert ClusterKey(KEY.secret)._public == KEY._public
    assert KEY._public != OTHER._public
    assert KEY.secret not in repr(KEY)


@pytest.mark.parametrize("secret", ["", "x" * 39, "x" * 41, "\u00fc" * 20, '"' * 40])
def test_what_is_no_key(secret: str) -> None:
    with pytest.raises(ValueError, match="not a secret key"):
        ClusterKey(secret)


def test_the_same_key_is_let_in(engine: RouterSocket, link_with: Callable[[ClusterKey], EngineLink]) -> None:
    address = host_and_port(engine.address)
    assert address is not None
    assert address[0] == "127.0.0.1"
    meets(engine, link_with(KEY))


def test_another_key_is_not(
    engine: RouterSocket, link_with: Callable[[ClusterKey], EngineLink], caplog: pytest.LogCaptureFixture
) -> None:
    stranger = link_with(OTHER)
    stranger.send([b"hello"])
    until(stranger.lost)
    assert engine.receive() is None
    until(lambda: "another --cluster-key-file" in caplog.text)
    meets(engine, link_with(KEY))


def test_knowing_the_public_key_is_not_enough(
    engine: RouterSocket, stack: ExitStack, link_with: Callable[[ClusterKey], EngineLink]
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stack.callback(context.term)
    thief = context.socket(zmq.DEALER)
    stack.callback(thief.close, 0)
    public, secret = zmq.curve_keypair()
    thief.setsockopt(zmq.CURVE_SERVERKEY, KEY._public)
    thief.setsockopt(zmq.CURVE_PUBLICKEY, public)
    thief.setsockopt(zmq.CURVE_SECRETKEY, secret)
    monitor = thief.get_monitor_socket(HANDSHAKE_FAILURES)
    stack.callback(monitor.close)
    thief.connect(engine.address)
    thief.send(b"hello")
    assert monitor.poll(int(WAIT_S * 1000))
    assert engine.receive() is None
    meets(engine, link_with(KEY))


def test_strangers_break_nothing_and_are_logged_once(
    engine: RouterSocket, link_with: Callable[[ClusterKey], EngineLink], caplog: pytest.LogCaptureFixture
) -> None:
    address = host_and_port(engine.address)
    assert address is not None
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    null = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    endless = b"\x06" + b"\xff" * 8  # a command frame that claims to be as long as can be
    with caplog.at_level(logging.WARNING):
        for said in (
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            b"\0" * 500,
            null,
            greeting + endless,
            greeting + b"\x04\x05x",
        ):
            with socket.create_connection(address, timeout=WAIT_S) as scanner:
                scanner.sendall(said)
        meets(engine, link_with(KEY))
        until(lambda: "refused" in caplog.text)
    assert len(re.findall("refused", caplog.text)) == 1


def test_a_member_knows_that_it_was_refused(engine: RouterSocket, stack: ExitStack) -> None:
    stranger, member = CoordinatorLink(engine.address, ME, OTHER), CoordinatorLink(engine.address, ME, KEY)
    stack.callback(stranger.close)
    stack.callback(member.close)
    until(stranger.refused)
    member.send(b"join")
    assert engine.wait(WAIT_S)
    assert not member.refused()
