"""The publisher's two sockets, read by a subscriber written from the description of the protocol alone."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from penstock.config.errors import ConfigError
from penstock.config.kv_events import (
    KVEventsConfig,
    address_of_rank,
    check_addresses,
    read_kv_events_config,
)
from penstock.engine.kv_events.publisher import KVEventPublisher
from penstock.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, decode_batch

STORED = BlockStored([1 << 63, 5], None, [7, 8, 9, 10], 2, None, "GPU", None, [["salt"], None])
TIMEOUT_MS = 10_000


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.rcvtimeo = TIMEOUT_MS
    yield context
    context.destroy(linger=0)


def make(directory: Path, **fields: Any) -> KVEventPublisher:
    config = KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"ipc://{directory}/events",
        replay_endpoint="tcp://127.0.0.1:0",
        topic="kv@host@model",
        **fields,
    )
    return KVEventPublisher(config, 1)


def replay(context: zmq.Context[zmq.Socket[bytes]], address: str, first: int) -> list[tuple[int, Any]]:
    with context.socket(zmq.DEALER) as socket:
        socket.connect(address)
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        batches = []
        while True:
            empty, topic, number, batch = socket.recv_multipart()
            assert empty == b""
            if number == b"\xff" * 8:
                return batches
            assert topic == b"kv@host@model"
            batches.append((struct.unpack(">Q", number)[0], msgspec.msgpack.decode(batch)))


def test_batches_are_published_in_order_with_rank_and_fields(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    publisher = make(tmp_path)
    with context.socket(zmq.XSUB) as events:
        events.connect(publisher.address)
        events.send(b"\x01kv@")
        assert publisher.address.endswith("events_dp1")
        _wait_for_subscriber(publisher, events)
        publisher.publish([])
        publisher.publish([STORED, BlockRemoved([5], "GPU")])
        publisher.publish([AllBlocksCleared()])
        topic, number, batch = events.recv_multipart()
        first = int.from_bytes(number, "big")
        at, fields, rank = msgspec.msgpack.decode(batch)
        assert (topic, rank) == (b"kv@host@model", 1)
        assert at > 1e9
        assert fields == [
            {
                "type": "BlockStored",
                "block_hashes": [1 << 63, 5],
                "parent_block_hash": None,
                "token_ids": [7, 8, 9, 10],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [["salt"], None],
            },
            {"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU"},
        ]
        topic, number, batch = events.recv_multipart()
        assert int.from_bytes(number, "big") == first + 1
        assert msgspec.msgpack.decode(batch)[1] == [{"type": "AllBlocksCleared"}]
    publisher.close()


def _wait_for_subscriber(publisher: KVEventPublisher, events: zmq.Socket[bytes]) -> None:
    """Publish until something comes: only then does the publisher know of the subscription."""
    events.rcvtimeo = 20
    for _ in range(500):
        publisher.publish([AllBlocksCleared()])
        try:
            while True:
                events.recv_multipart()
                events.rcvtimeo = 0
        except zmq.Again:
            if events.rcvtimeo == 0:
                break
    events.rcvtimeo = TIMEOUT_MS


def test_what_was_missed_is_replayed(tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    publisher = make(tmp_path, buffer_steps=3)
    assert publisher.replay_address is not None
    for hash in range(5):
        publisher.publish([BlockRemoved([hash], "GPU")])
    assert [number for number, _ in replay(context, publisher.replay_address, 3)] == [3, 4]
    assert [number for number, _ in replay(context, publisher.replay_address, 0)] == [2, 3, 4]
    assert replay(context, publisher.replay_address, 5) == []
    publisher.close()


def test_a_malformed_request_for_a_replay_harms_nobody(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    publisher = make(tmp_path)
    assert publisher.replay_address is not None
    publisher.publish([AllBlocksCleared()])
    with context.socket(zmq.DEALER) as socket:
        socket.connect(publisher.replay_address)
        for parts in ((b"",), (b"", b"1"), (b"", b"", b"", b""), (b"", bytes(10_000))):
            socket.send_multipart(parts)
        assert len(replay(context, publisher.replay_address, 0)) == 1
    publisher.close()


def test_an_address_in_use_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.kv_events.publisher.BIND_TIMEOUT_S", 0.0)
    with zmq.Context() as other, other.socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        config = KVEventsConfig(enable_kv_cache_events=True, endpoint=f"tcp://127.0.0.1:{port}")
        with pytest.raises(ConfigError, match=f"endpoint tcp://127.0.0.1:{port}: Address already in use"):
            KVEventPublisher(config, 0)


# -- the format


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ([["BlockRemoved", [1, 2]]], [BlockRemoved([1, 2], None)]),  # vLLM 0.9: arrays, fewer fields
        (
            [["BlockStored", [b"x"], None, [1, 2], 2, None]],
            [BlockStored([b"x"], None, [1, 2], 2, None, None, None)],
        ),
        ([["AllBlocksCleared"]], [AllBlocksCleared()]),
        ([{"type": "BlockMoved", "to": 1}, {"type": "AllBlocksCleared"}], [AllBlocksCleared()]),
        (
            [{"type": "BlockRemoved", "block_hashes": [3], "medium": "CPU", "locality": "REMOTE"}],
            [BlockRemoved([3], "CPU")],
        ),
    ],
)
def test_events_of_other_versions_are_read(sent: list[Any], read: list[KVCacheEvent]) -> None:
    assert decode_batch(msgspec.msgpack.encode([1.0, sent, 0])) == read


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"ts": 1}),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, [1]]),
        msgspec.msgpack.encode([1.0, [[]]]),
        msgspec.msgpack.encode([1.0, [{"type": ["a"]}]]),
        msgspec.msgpack.encode([1.0, [["BlockStored", "x"]]]),
        b"\x92\x01" + 100_000 * b"\x91" + b"\x00",
        b"\x92\x01\x92\x01" + 100_000 * b"\x91" + b"\x00",
    ],
)
def test_what_is_no_batch_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_batch(data)


# -- the option


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "truncated; it takes a JSON object with enable_kv_cache_events"),
        ('{"enable": true}', "unknown field `enable`"),
        ('{"endpoint": "5557"}', "endpoint '5557' is not allowed; it takes tcp://HOST:PORT"),
        ('{"replay_endpoint": "tcp://*:99999"}', "replay_endpoint 'tcp://[*]:99999' is not allowed"),
        ('{"publisher": "kafka"}', "Invalid enum value 'kafka'"),
        ('{"buffer_steps": 0}', ">= 1"),
    ],
)
def test_a_bad_configuration_names_the_field(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_kv_events_config(text)


def test_each_rank_has_an_address() -> None:
    assert address_of_rank("tcp://*:5557", 3) == "tcp://*:5560"
    assert address_of_rank("tcp://[::1]:5557", 0) == "tcp://[::1]:5557"
    assert address_of_rank("tcp://127.0.0.1:0", 3) == "tcp://127.0.0.1:0"
    with pytest.raises(ValueError, match="leaves no port for rank 9"):
        address_of_rank("tcp://*:65530", 9)


@pytest.mark.parametrize(
    ("endpoint", "replay", "problem"),
    [
        ("tcp://*:5557", "tcp://*:5558", "2 ranks share tcp://[*]:5558"),
        ("tcp://*:5557", "tcp://*:5557", "2 ranks share tcp://[*]:5557"),
        ("ipc:///a", "ipc:///a", "2 ranks share ipc:///a"),
        ("tcp://*:65535", None, "leaves no port for rank 1"),
        ("tcp://*:5557", "tcp://*:5559", None),
        ("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", None),
    ],
)
def test_each_rank_has_addresses_of_its_own(endpoint: str, replay: str | None, problem: str | None) -> None:
    config = KVEventsConfig(endpoint=endpoint, replay_endpoint=replay)
    with nullcontext() if problem is None else pytest.raises(ValueError, match=problem):
        check_addresses(config, 2)
