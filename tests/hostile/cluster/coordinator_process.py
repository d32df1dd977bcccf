"""A real coordinator process, and members of it over tcp."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import zmq

from penstock.wire.coordination import (
    COORDINATOR_PROTOCOL_VERSION,
    ENGINE_TRAITS,
    EngineJoin,
    EngineReport,
    FleetLoad,
    FromCoordinator,
    JoinAccepted,
    Rejoin,
    ServerJoin,
    decode_from_coordinator,
)
from penstock.wire.curve import ClusterKey
from penstock.wire.messages import encode
from penstock.wire.sockets import CoordinatorLink, engine_identity, server_identity

WAIT_S = 90.0
KEY = ClusterKey.generate()
HEAD = 77
"""The head's incarnation."""
RANKS = 8
MAIN = f"""
import sys
from penstock import logging_setup
from penstock.config.serve import ServeConfig
from penstock.coordinator.process import run
from tests.launches import launch

class Control:
    launch = launch(
        "coordinator",
        sys.argv[1],
        config=ServeConfig(coordinator=sys.argv[2], cluster_key_file="key"),
        cluster_key=sys.argv[3],
        engine_count={RANKS},
        incarnation={HEAD},
    )
    def receive(self): return []
    def fileno(self): return 0
    def ready(self): print("ready", flush=True)
    def heartbeat(self): pass

logging_setup.configure("coordinator", "info")
run(Control())
"""


class CoordinatorProcess:
    def __init__(self, directory: Path, stack: ExitStack) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{port}"
        self._log = directory / "coordinator.log"
        self._stack = stack
        self._process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", MAIN, str(directory), self.address, KEY.secret],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stack.enter_context(self._log.open("w")),
                text=True,
            )
        )
        stack.callback(self._process.kill)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", self.log

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def memory(self) -> int:
        return int(psutil.Process(self._process.pid).memory_info().rss)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def link(self, identity: bytes) -> CoordinatorLink:
        link = CoordinatorLink(self.address, identity, KEY)
        self._stack.callback(link.close)
        return link

    def stranger(self, identity: bytes) -> zmq.Socket[bytes]:
        """A member that sends what it likes, and waits while the coordinator reads no more."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stack.callback(context.term)
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IDENTITY, identity)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.SNDHWM, 64)
        dealer.setsockopt(zmq.SNDTIMEO, int(WAIT_S * 1000))
        KEY.secure_client(dealer)
        dealer.connect(self.address)
        self._stack.callback(dealer.close)
        return dealer


class Honest:
    """An engine and an API server, which is told the engine's load."""

    def __init__(self, coordinator: CoordinatorProcess) -> None:
        self._engine = coordinator.link(engine_identity(0, 0, 5))
        self._server = coordinator.link(server_identity(0, 0, HEAD))
        self._engine_join = encode(
            EngineJoin(
                *(COORDINATOR_PROTOCOL_VERSION, 0, 0, 5, "tcp://127.0.0.1:5"),
                dict.fromkeys(ENGINE_TRAITS, "x"),
            )
        )
        self._server_join = encode(ServerJoin(COORDINATOR_PROTOCOL_VERSION, 0, 0, HEAD))
        self._step = 0
        for link, join in ((self._engine, self._engine_join), (self._server, self._server_join)):
            link.send(join)
            assert self._until(link, JoinAccepted)

    def _until(self, link: CoordinatorLink, kind: type[FromCoordinator]) -> FromCoordinator:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            if link.wait(0.1) and (part := link.receive()) is not None:
                message = decode_from_coordinator(part)
                if isinstance(message, kind):
                    return message
                if isinstance(message, Rejoin):
                    link.send(self._server_join if link is self._server else self._engine_join)
        raise AssertionError(f"no {kind.__name__}")

    def exchange(self) -> float:
        """Report a load, and wait until the API server is told; returns the seconds that it took."""
        self._step += 1
        began = time.monotonic()
        self._engine.send(encode(EngineReport(self._step, 1, 2, 0.25, [0, self._step])))
        while True:
            news = self._until(self._server, FleetLoad)
            assert isinstance(news, FleetLoad)
            if any((engine.rank, engine.step) == (0, self._step) for engine in news.engines):
                return time.monotonic() - began
