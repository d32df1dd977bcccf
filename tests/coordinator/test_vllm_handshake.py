"""The handshake with vLLM's engines, over real sockets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from penstock.coordinator.vllm_handshake import VllmHandshake
from penstock.wire.vllm.attachment_file import Attachment, AttachmentFile, data_ports

HELLO = {"status": "HELLO", "local": False, "headless": True}
Context = zmq.Context[zmq.Socket[bytes]]


class Engine:
    """The engine's end."""

    def __init__(self, context: Context, port: int, rank: int | bytes) -> None:
        self.socket = context.socket(zmq.DEALER)
        identity = rank if isinstance(rank, bytes) else rank.to_bytes(2, "little")
        self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def send(self, message: Any) -> None:
        self.socket.send(message if isinstance(message, bytes) else msgspec.msgpack.encode(message))

    def reply(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.msgpack.decode(self.socket.recv(zmq.NOBLOCK))
        return found


@pytest.fixture
def context() -> Iterator[Context]:
    made: Context = zmq.Context()
    yield made
    made.destroy(linger=0)


Open = Callable[..., VllmHandshake]


@pytest.fixture
def open_handshake(tmp_path: Path) -> Iterator[Open]:
    with ExitStack() as stack:

        def opened(**options: Any) -> VllmHandshake:
            given = {"ranks": 2, "run_dir": str(tmp_path), "in_group": False} | options
            return stack.enter_context(closing(VllmHandshake("127.0.0.1", 0, **given)))

        yield opened


def serve(handshake: VllmHandshake, until: Callable[[], bool]) -> None:
    """Run it until something has happened, 10 seconds at most."""
    poller = zmq.Poller()
    for socket in handshake.wakeups:
        poller.register(socket, zmq.POLLIN)
    for _ in range(100):
        handshake.run_once()
        if until():
            return
        poller.poll(100)
    raise AssertionError("nothing happened")


def test_an_engine_is_told_its_own_addresses(open_handshake: Open, context: Context, tmp_path: Path) -> None:
    handshake = open_handshake()
    AttachmentFile(str(tmp_path), 0, 1).save(Attachment((4001, 4002)))
    engine = Engine(context, handshake.port, 1)
    engine.send(HELLO)
    serve(handshake, lambda: bool(engine.socket.poll(0)))
    assert engine.reply() == {
        "addresses": {
            "inputs": ["tcp://127.0.0.1:4001"],
            "outputs": ["tcp://127.0.0.1:4002"],
            "coordinator_input": None,
            "coordinator_output": None,
            "frontend_stats_publish_address": None,
        },
        "parallel_config": {},
    }
    engine.socket.close()


def test_an_engine_waits_until_its_sockets_are_bound(
    open_handshake: Open, context: Context, tmp_path: Path
) -> None:
    handshake = open_handshake()
    engine = Engine(context, handshake.port, 0)
    engine.send(HELLO)
    serve(handshake, lambda: handshake.run_once() is not None)
    assert not engine.socket.poll(0)
    AttachmentFile(str(tmp_path), 0, 0).save(Attachment((4001, 4002)))
    serve(handshake, lambda: bool(engine.socket.poll(0)))
    assert handshake.run_once() is None
    engine.socket.close()


def test_ports_follow_that_of_the_handshake() -> None:
    assert [data_ports(29550, rank) for rank in range(3)] == [(29551, 29552), (29553, 29554), (29555, 29556)]


def test_what_is_no_engine_is_ignored_and_named(
    open_handshake: Open, context: Context, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handshake = open_handshake()
    AttachmentFile(str(tmp_path), 0, 0).save(Attachment((4001, 4002)))
    strange = [Engine(context, handshake.port, identity) for identity in (7, b"x", b"longer", 1)]
    with caplog.at_level(logging.ERROR):
        for each in strange[:3]:
            each.send(HELLO)
        for garbage in (b"", b"\xc1", b"\x91" * 5000, {"status": 5}, {}, [1]):
            strange[3].send(garbage)
        good = Engine(context, handshake.port, 0)
        good.send(HELLO)
        serve(handshake, lambda: bool(good.socket.poll(0)))
        serve(handshake, lambda: "engine 7 at 127.0.0.1 wants to be attached" in caplog.text)
    assert good.reply()["addresses"]["inputs"] == ["tcp://127.0.0.1:4001"]
    assert not any(each.socket.poll(0) for each in strange)
    for each in (*strange, good):
        each.socket.close()


def test_engines_that_step_together_are_answered_together(
    open_handshake: Open, context: Context, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handshake = open_handshake(in_group=True)
    for rank in range(2):
        AttachmentFile(str(tmp_path), 0, rank).save(Attachment((4001 + rank, 4003 + rank)))
    engines = [Engine(context, handshake.port, rank) for rank in range(2)]
    engines[1].send(HELLO)
    serve(handshake, lambda: handshake.run_once() is not None)
    assert not engines[1].socket.poll(0)
    engines[0].send(HELLO)
    serve(handshake, lambda: all(engine.socket.poll(0) for engine in engines))
    first, second = (engine.reply() for engine in engines)
    assert first["parallel_config"] == second["parallel_config"]
    told = first["parallel_config"]
    assert told["data_parallel_master_ip"] == "127.0.0.1"
    assert told["data_parallel_size"] == 2
    assert told["data_parallel_master_port"] == told["_data_parallel_master_port_list"][0]
    assert handshake.waves is not None
    ports = [f"tcp://127.0.0.1:{port}" for port in handshake.waves.ports]
    assert [first["addresses"][name] for name in ("coordinator_input", "coordinator_output")] == ports
    with caplog.at_level(logging.ERROR):
        for engine, digest in zip(engines, ("a", "b"), strict=True):
            engine.send({"status": "READY", "headless": True, "parallel_config_hash": digest})
        serve(handshake, lambda: "configured in another way" in caplog.text)
    for engine in engines:
        engine.socket.close()


def test_a_port_in_use_is_named(open_handshake: Open, tmp_path: Path) -> None:
    taken = open_handshake().port
    with pytest.raises(zmq.ZMQError, match=rf"--attach tcp://127.0.0.1:{taken}: Address already in use"):
        VllmHandshake("127.0.0.1", taken, ranks=1, run_dir=str(tmp_path), in_group=False)
