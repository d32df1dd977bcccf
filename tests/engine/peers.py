"""The other ends of an engine process, for its tests: API servers and the supervisor."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from penstock.config.serve import ServeConfig
from penstock.wire.channel import ChildChannel
from penstock.wire.control import Launch
from penstock.wire.messages import ENGINE_PROTOCOL_VERSION, Hello, RpcCall, RpcReply, Welcome, encode
from penstock.wire.sockets import EngineLink, engine_address, server_identity
from tests.engine.support import Received
from tests.launches import launch

DEADLINE_S = 60.0


class ApiServer:
    """A DEALER that checks what it receives (see :class:`Received`)."""

    def __init__(self, run_dir: str, server: int = 0, epoch: int = 0, rank: int = 0) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.link = EngineLink(self._context, engine_address(run_dir, rank), server_identity(server, epoch))
        self._hello = Hello(ENGINE_PROTOCOL_VERSION, server, epoch)
        self._calls = 0
        self.received = Received()

    def hello(self) -> Welcome:
        self.send(self._hello)
        self.read(lambda: bool(self.received.others))
        welcome = self.received.others.pop(0)
        assert isinstance(welcome, Welcome)
        return welcome

    def send(self, *messages: Any) -> None:
        self.link.send([encode(message) for message in messages])

    def read(self, until: Callable[[], bool]) -> Received:
        """Take what comes until the condition holds."""
        deadline = time.monotonic() + DEADLINE_S
        while not until():
            parts = self.link.receive()
            if parts is not None:
                self.received.parts(parts)
                continue
            assert time.monotonic() < deadline, f"not received: {self.received.others}"
            select.select([self.link.fd], [], [], 0.02)
        return self.received

    def read_ends(self, *streams: int) -> Received:
        return self.read(lambda: all(self.received.ended(stream) for stream in streams))

    def call(self, method: str, **arguments: Any) -> RpcReply:
        self._calls += 1
        self.send(RpcCall(self._calls, method, arguments))
        self.read(lambda: bool(self.received.others))
        reply = self.received.others.pop(0)
        assert isinstance(reply, RpcReply)
        assert reply.call == self._calls
        return reply

    def ping(self) -> None:
        """One round trip: a call that changes nothing in a synthetic engine."""
        assert self.call("reset_prefix_cache").error is None

    def ping_until(self, condition: Callable[[], bool]) -> None:
        """Ping until the condition holds."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline
            self.ping()

    def close(self) -> None:
        self.link.close()
        self._context.term()


def engine_launch(model_dir: Path, run_dir: str, **options: Any) -> Launch:
    """Of a synthetic engine that API servers reach in ``run_dir``."""
    config = ServeConfig(engine="synthetic", **options)
    return launch("engine", str(model_dir), run_dir=run_dir, config=config, local_ranks=[0])


def reports_until(channel: ChildChannel, kind: type) -> list[Any]:
    """The child's reports up to the first of ``kind``."""
    reports: list[Any] = []
    deadline = time.monotonic() + DEADLINE_S
    while not any(isinstance(report, kind) for report in reports):
        assert time.monotonic() < deadline, f"no {kind.__name__} among {reports}"
        select.select([channel.fileno()], [], [], 1.0)
        reports += channel.receive()
    return reports
