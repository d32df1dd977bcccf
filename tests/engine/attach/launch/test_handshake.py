"""An engine that is started here learns its sockets and its rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from penstock.config.serve import ServeConfig
from penstock.engine.attach.launch.handshake import IDENTITY, LaunchHandshake
from penstock.engine.attach.launch.start_engine import handshake_reply

POLL_MS = 10_000


Connect = Callable[[LaunchHandshake, bytes], zmq.Socket[bytes]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Connects an engine, or a stranger, by its identity."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets: list[zmq.Socket[bytes]] = []

    def connected(handshake: LaunchHandshake, identity: bytes) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        host, port = handshake.address
        socket.connect(f"tcp://{host}:{port}")
        sockets.append(socket)
        return socket

    yield connected
    for socket in sockets:
        socket.close(linger=0)
    context.term()


def answer_until(handshake: LaunchHandshake, socket: zmq.Socket[bytes]) -> Any:
    for _ in range(POLL_MS // 10):
        handshake.answer()
        if socket.poll(10):
            return msgspec.msgpack.decode(socket.recv())
    raise AssertionError("no answer")


def place(rank: int, **options: Any) -> dict[str, Any]:
    config = ServeConfig(engine="vllm", data_parallel_size=4, **options)
    return handshake_reply(config, rank, ("ipc:///in", "ipc:///out")).parallel_config


def test_it_is_told_its_sockets_and_its_place(connect: Connect) -> None:
    config = ServeConfig(engine="vllm", data_parallel_size=4)
    handshake = LaunchHandshake(handshake_reply(config, 2, ("ipc:///in", "ipc:///out")))
    engine = connect(handshake, IDENTITY)
    engine.send(msgspec.msgpack.encode({"status": "HELLO", "local": False, "headless": True}))
    found = answer_until(handshake, engine)
    assert found["addresses"]["inputs"] == ["ipc:///in"]
    assert found["addresses"]["outputs"] == ["ipc:///out"]
    assert found["parallel_config"] == {"data_parallel_index": 2, "data_parallel_rank_local": 2}
    assert not handshake.has_loaded
    engine.send(msgspec.msgpack.encode({"status": "READY"}))
    for _ in range(POLL_MS // 10):
        handshake.answer()
        if handshake.has_loaded:
            break
        engine.poll(10)
    assert handshake.has_loaded
    handshake.close()


def test_strangers_are_ignored(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    handshake = LaunchHandshake(handshake_reply(ServeConfig(engine="vllm"), 0, ("ipc:///in", "ipc:///out")))
    stranger, engine = connect(handshake, b"\x07\x00"), connect(handshake, IDENTITY)
    stranger.send(msgspec.msgpack.encode({"status": "READY"}))
    for garbage in (b"", b"\xc1", b"\x91" * 1000):
        engine.send(garbage)
    engine.send(msgspec.msgpack.encode({"status": "HELLO"}))
    assert answer_until(handshake, engine)["addresses"]["inputs"] == ["ipc:///in"]
    for _ in range(20):
        handshake.answer()
        stranger.poll(10)
    assert not handshake.has_loaded
    assert "is no engine's: it is ignored" in caplog.text
    handshake.close()


def test_gpus_are_counted_from_the_hosts_first_rank() -> None:
    assert place(3) == {"data_parallel_index": 3, "data_parallel_rank_local": 3}
    fleet = {"coordinator": "tcp://h:1", "cluster_key_file": "f"}
    second_host = {"headless": True, "data_parallel_start_rank": 2, "data_parallel_size_local": 2}
    assert place(3, **fleet, **second_host) == {"data_parallel_index": 3, "data_parallel_rank_local": 1}
    on_ray = place(3, **fleet, data_parallel_backend="ray")
    assert on_ray == {"data_parallel_index": 3, "data_parallel_rank_local": 0}
