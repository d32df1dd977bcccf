"""Connections over tcp that break while their messages wait, and that die without a word."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest
import zmq

from penstock.wire.curve import ClusterKey
from penstock.wire.sockets import CoordinatorLink, EngineLink, RouterSocket, server_identity

WAIT_S = 90.0
HEARTBEATS_S = 2.5
"""Time in which two heartbeats of ZMQ would be sent."""
KEY = ClusterKey.generate()
ME = server_identity(0, 0)

# A process with one end of a connection that reads nothing before it is told to. ZMQ's thread works
# meanwhile.
READER = """
import sys, zmq
from penstock.wire.curve import ClusterKey
from penstock.wire.sockets import CoordinatorLink, EngineLink, RouterSocket
kind, address, identity, secret = sys.argv[1:]
key = ClusterKey(secret)
if kind == "router":
    end = RouterSocket("tcp://127.0.0.1:*", key=key, receive_queue=16)
    print(end.address, flush=True)
elif kind == "engine link":
    end = EngineLink(zmq.Context(), address, identity.encode(), key)
    end.send([b"hello"])
else:
    end = CoordinatorLink(address, identity.encode(), key)
    end.send(b"hello")
sys.stdin.readline()
while end.receive() is not None:
    pass
"""


@pytest.fixture
def reader(stack: ExitStack) -> Callable[..., subprocess.Popen[str]]:
    def start(kind: str, address: str = "") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", READER, kind, address, ME.decode(), KEY.secret],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.enter_context(process)
        stack.callback(process.kill)
        return process

    return start


@pytest.fixture
def engine(stack: ExitStack) -> RouterSocket:
    made = RouterSocket("tcp://127.0.0.1:*", key=KEY)
    stack.callback(made.close)
    return made


@pytest.fixture
def link(engine: RouterSocket, stack: ExitStack) -> EngineLink:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stack.callback(context.term)
    made = EngineLink(context, engine.address, ME, KEY)
    stack.callback(made.close)
    made.send([b"hello"])
    assert engine.wait(WAIT_S)
    assert engine.receive() == (ME, [b"hello"])
    return made


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def fill(send: Callable[[], bool]) -> None:
    """Send until all queues and buffers up to the reader have been full for a while."""
    full_at = time.monotonic()
    while time.monotonic() < full_at + 0.2:
        if send():
            full_at = time.monotonic()
        else:
            time.sleep(0.01)


def ends_well(process: subprocess.Popen[str]) -> None:
    """Once its messages are read, and not before."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(HEARTBEATS_S)
    assert process.poll() is None
    process.communicate("read\n", timeout=WAIT_S)
    assert process.returncode == 0


@pytest.mark.parametrize("kind", ["engine link", "coordinator link"])
def test_a_router_goes_while_its_messages_wait(
    kind: str, reader: Callable[..., subprocess.Popen[str]]
) -> None:
    """libzmq 4.3.5 aborts the process when a heartbeat is due on a connection that broke while its input was
    stopped."""
    engine = RouterSocket("tcp://127.0.0.1:*", key=KEY)
    try:
        process = reader(kind, engine.address)
        assert engine.wait(WAIT_S)
        fill(lambda: engine.send(ME, [bytes(60_000)]))
    finally:
        engine.close()
    ends_well(process)


def test_a_member_goes_while_its_messages_wait(reader: Callable[..., subprocess.Popen[str]]) -> None:
    process = reader("router")
    assert process.stdout is not None
    link = CoordinatorLink(process.stdout.readline().strip(), ME, KEY)
    try:
        fill(lambda: link.send(bytes(60_000)))
    finally:
        link.close()
    ends_well(process)


@pytest.mark.slow
def test_an_api_server_that_is_stopped_under_load_goes_on(
    engine: RouterSocket, reader: Callable[..., subprocess.Popen[str]]
) -> None:
    process = reader("engine link", engine.address)
    assert engine.wait(WAIT_S)
    stopped_until = time.monotonic() + 7.0
    process.send_signal(signal.SIGSTOP)
    with suppress(ConnectionError):  # the connection may break
        while time.monotonic() < stopped_until:
            if not engine.send(ME, [bytes(500)]):
                time.sleep(0.01)
    process.send_signal(signal.SIGCONT)
    ends_well(process)


# -- an end that no packet reaches any more


class _Instruction(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_ushort),
        ("jt", ctypes.c_ubyte),
        ("jf", ctypes.c_ubyte),
        ("k", ctypes.c_uint),
    ]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.POINTER(_Instruction))]


_SO_ATTACH_FILTER = 26
_RETURN = 0x06


def cut_off(port: int) -> None:
    """The kernel drops what arrives on this process's connections to and from ``port``; nobody is told."""
    instruction = _Instruction(_RETURN, 0, 0, 0)
    program = _Program(1, ctypes.pointer(instruction))
    for connection in connections(port):
        connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, bytes(program))


def connections(port: int) -> Iterator[socket.socket]:
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            ends = connection.getsockname(), connection.getpeername()
            if any(isinstance(end, tuple) and end[1] == port for end in ends):
                yield connection


@pytest.mark.parametrize("busy", [False, True])
def test_both_ends_notice_a_connection_that_died(engine: RouterSocket, link: EngineLink, busy: bool) -> None:
    cut_off(int(engine.address.rpartition(":")[2]))
    if busy:
        link.send([b"lost"])
        engine.send(ME, [b"lost"])
    until(link.lost)
    until(lambda: engine.disconnects == 1)
    assert link.receive() is None
    assert engine.receive() is None
