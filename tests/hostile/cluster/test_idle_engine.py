"""An engine of another host: it notices dead connections to API servers while it is idle, belongs to one
head, and serves an API server under whose identity another process connects."""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from penstock.config.serve import ServeConfig
from penstock.engine.loop.identity import EngineIdentity
from penstock.engine.loop.process import EngineLoop
from penstock.engine.synthetic.engine import SyntheticEngine
from penstock.wire.channel import ChildChannel, ControlChannel
from penstock.wire.control import Stop
from penstock.wire.curve import ClusterKey
from penstock.wire.decoding import decode_from_engine
from penstock.wire.messages import (
    ENGINE_PROTOCOL_VERSION,
    EngineMetrics,
    FromEngine,
    GoAway,
    Hello,
    Welcome,
    encode,
)
from penstock.wire.sockets import EngineLink, RouterSocket, server_identity
from tests.engine.conftest import model_dir  # noqa: F401 - a fixture
from tests.engine.support import Received, submit

WAIT_S = 90.0
KEY = ClusterKey.generate()


@pytest.fixture
def address(model_dir: Path) -> Iterator[str]:  # noqa: F811
    """Of a running engine that has joined no head."""
    engine = SyntheticEngine(ServeConfig(engine="synthetic"), str(model_dir))
    socket = RouterSocket("tcp://127.0.0.1:*", key=KEY)
    loop = EngineLoop(engine, socket, EngineIdentity(0, incarnation=3))
    supervisor, theirs = ChildChannel.pair()
    control = ControlChannel(theirs.detach())
    thread = threading.Thread(target=loop.run, args=(control,), daemon=True)
    thread.start()
    yield socket.address
    supervisor.send(Stop())
    thread.join(WAIT_S)
    assert not thread.is_alive()
    for channel in (control, supervisor):
        channel.close()
    socket.close()


class Server:
    """API server 0 of the head with this incarnation."""

    def __init__(self, address: str, incarnation: int, stack: ExitStack) -> None:
        self._address = address
        self._incarnation = incarnation
        self._connection = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(self._context.term)
        stack.callback(lambda: self.link.close())
        self.link = self._connect()

    def _connect(self) -> EngineLink:
        self.identity = server_identity(0, 0, self._incarnation, self._connection)
        self.hello = Hello(ENGINE_PROTOCOL_VERSION, 0, 0, self._incarnation, self._connection)
        link = EngineLink(self._context, self._address, self.identity, KEY)
        link.send([encode(self.hello)])
        self._connection += 1
        return link

    def read(self, received: Received, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not until():
            assert time.monotonic() < deadline, received.tokens
            parts = self.link.receive()
            if parts is None:
                select.select([self.link.fd], [], [], 0.05)
            else:
                received.parts(parts)

    def answer(self) -> FromEngine:
        """The first message that is not about metrics."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            parts = self.link.receive()
            if parts is None:
                select.select([self.link.fd], [], [], 0.05)
            elif not isinstance(message := decode_from_engine(parts[0]), EngineMetrics):
                return message
        raise AssertionError("no answer")

    def until_welcome(self) -> None:
        """Connect again and again, as API servers do."""
        deadline = time.monotonic() + WAIT_S
        while True:
            assert time.monotonic() < deadline
            self.link.close()
            self.link = self._connect()
            if isinstance(self.answer(), Welcome):
                return
            time.sleep(0.05)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_an_idle_engine_notices_a_dead_connection(
    address: str, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        server = Server(address, 7, stack)
        assert isinstance(server.answer(), Welcome)
        server.link.close()
        deadline = time.monotonic() + WAIT_S
        while "is gone" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize(("first", "second"), [(8, 7), (7, 8)])
def test_another_heads_api_server_is_taken_once_the_first_one_is_gone(
    address: str, stack: ExitStack, first: int, second: int
) -> None:
    former, latter = Server(address, first, stack), Server(address, second, stack)
    if isinstance(former.answer(), GoAway):  # whichever came first has it
        former, latter = latter, former
        assert isinstance(former.answer(), Welcome)
    else:
        assert isinstance(latter.answer(), GoAway)
    former.link.close()
    latter.until_welcome()


def double_of(server: Server, address: str, stack: ExitStack) -> zmq.Socket[bytes]:
    """A connection under the same number, epoch, incarnation and connection, with its handshake over."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stack.callback(context.term)
    double = context.socket(zmq.DEALER)
    stack.callback(double.close, 0)
    double.setsockopt(zmq.IDENTITY, server.identity)
    KEY.secure_client(double)
    monitor = double.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    stack.callback(monitor.close)
    stack.callback(double.disable_monitor)
    double.connect(address)
    double.send(encode(server.hello))
    assert monitor.poll(WAIT_S * 1000)
    return double


def test_a_process_under_another_ones_identity_takes_no_streams(address: str, stack: ExitStack) -> None:
    server = Server(address, 7, stack)
    assert isinstance(server.answer(), Welcome)
    received = Received()
    server.link.send([encode(submit(1, 100))])
    server.read(received, lambda: 1 in received.tokens)
    double = double_of(server, address, stack)
    server.read(received, lambda: received.ended(1))
    assert len(received.tokens[1]) == 100
    assert not double.poll(0)
