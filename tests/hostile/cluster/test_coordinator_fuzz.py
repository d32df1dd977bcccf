"""A member with the key that sends anything: the others see each other's loads, and the coordinator's memory
and log do not grow."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import zmq

from penstock.metrics import families as f
from penstock.metrics.snapshot import Series, Snapshot, encode_snapshot
from penstock.wire.coordination import (
    COORDINATOR_PROTOCOL_VERSION,
    EngineJoin,
    EngineReport,
    MemberLeave,
    MetricsQuery,
    ProcessMetrics,
    ServerJoin,
)
from penstock.wire.messages import encode
from penstock.wire.sockets import engine_identity, server_identity
from tests.hostile.cluster.coordinator_process import HEAD, CoordinatorProcess, Honest

ODD_BYTES = (0x00, 0x7F, 0x80, 0xC0, 0xC1, 0xD9, 0xDB, 0xDD, 0xDF, 0xED, 0xFF)
ODD_NUMBERS = (-1, 0, 1, 255, 1023, 1024, 1 << 31, (1 << 31) - 1, 1 << 62, (1 << 63) - 1, 1 << 63)
ODD_TEXTS = (
    "",
    "foo",
    "tcp://foo:1",
    "tcp://1.2.3.4:99999",
    "tcp://[::1]:5",
    "engine 1",
    "x" * 70_000,
    "é\x00",
)
GROWTH = 60 << 20
"""Memory that a coordinator may take for what one member says: most of it for metrics."""


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    with ExitStack() as stack:
        yield CoordinatorProcess(tmp_path, stack)


class Fuzzer:
    """Messages of every type, most of them damaged."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def message(self) -> list[bytes]:
        choose = self._random.choice
        part = msgspec.msgpack.encode(self._valid())
        match self._random.randrange(8):
            case 0:
                return [part]
            case 1:
                return [part[: self._random.randrange(len(part) + 1)]]
            case 2:
                return [part, *([part] * self._random.randrange(1, 5))]
            case 3:
                fields = msgspec.msgpack.decode(part)
                fields[self._random.randrange(len(fields))] = choose(
                    (*ODD_NUMBERS[:-1], *ODD_TEXTS, None, [], {})
                )
                return [msgspec.msgpack.encode(fields)]
            case 4:
                return [bytes(self._random.randrange(256) for _ in range(self._random.randrange(64)))]
            case _:
                damaged = bytearray(part)
                for _ in range(self._random.randint(1, 3)):
                    damaged[self._random.randrange(len(damaged))] = choose(ODD_BYTES)
                return [bytes(damaged)]

    def _valid(self) -> object:
        number, choose = self._random.randrange, self._random.choice
        match number(7):
            case 6:
                return MetricsQuery(number(1 << 31))
            case 0:
                traits = {f"t{n}": "v" * number(50) for n in range(number(80))}
                address = choose(("tcp://127.0.0.1:5", *ODD_TEXTS))
                return EngineJoin(
                    COORDINATOR_PROTOCOL_VERSION, choose((1, 9)), number(1 << 31), 6, address, traits
                )
            case 1:
                return ServerJoin(COORDINATOR_PROTOCOL_VERSION, 1, number(3), choose((HEAD, 6)))
            case 2:
                return EngineReport(
                    number(1 << 40), number(9), number(9), number(1001) / 1000, [number(9)] * number(9)
                )
            case 3:
                return MemberLeave()
            case _:
                return self.metrics()

    def metrics(self) -> ProcessMetrics:
        """Of an invented process, or an invented start of one that is there."""
        number, choose = self._random.randrange, self._random.choice
        process = choose(
            (f"engine {number(40_000)}", f"api-server {number(40_000)}", "engine 0", "stranger 1")
        )
        series = [
            Series(f.UNKNOWN_FIELDS.name, ("0", f"{number(1 << 40)}"), number(1 << 40))
            for _ in range(number(200))
        ]
        covers = {number(1 << 60): number(1 << 30) for _ in range(number(100))} if number(4) == 0 else {}
        snapshot = Snapshot(process, number(1 << 30), number(1 << 40), series, number(1 << 60), covers)
        data = encode_snapshot(snapshot)
        return ProcessMetrics(process, snapshot.epoch, snapshot.sequence, data, snapshot.incarnation)


def drain(member: zmq.Socket[bytes]) -> None:
    """Take the answers: who does not is disconnected after a while."""
    while member.poll(0):
        member.recv_multipart()


def attack(coordinator: CoordinatorProcess, rounds: int, seed: int) -> None:
    honest, fuzzer = Honest(coordinator), Fuzzer(seed)
    hostile = [
        coordinator.stranger(identity)
        for identity in (server_identity(1, 0, HEAD), engine_identity(1, 0, 6), b"\xff\x00odd")
    ]
    honest.exchange()
    before = coordinator.memory
    for round_ in range(rounds):
        hostile[0].send(encode(ServerJoin(COORDINATOR_PROTOCOL_VERSION, 1, 0, HEAD)))
        for number in range(300):
            drain(hostile[number % 3])
            hostile[number % 3].send_multipart(fuzzer.message())
        assert coordinator.alive, coordinator.log
        honest.exchange()
        assert coordinator.memory - before < GROWTH, round_
    assert len(re.findall("is refused a message", coordinator.log)) == 3, coordinator.log
    assert "Traceback" not in coordinator.log


def test_a_member_that_sends_anything_harms_nobody(coordinator: CoordinatorProcess) -> None:
    attack(coordinator, rounds=6, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_member_that_sends_anything_for_long_harms_nobody(
    coordinator: CoordinatorProcess, seed: int
) -> None:
    attack(coordinator, rounds=150, seed=seed)


def test_metrics_of_invented_processes_are_bounded(coordinator: CoordinatorProcess) -> None:
    honest = Honest(coordinator)
    hostile = coordinator.stranger(server_identity(1, 0, HEAD))
    hostile.send(encode(ServerJoin(COORDINATOR_PROTOCOL_VERSION, 1, 0, HEAD)))
    honest.exchange()
    before = coordinator.memory
    series = [Series(f.DELIVERED.name, ("x" * 60_000,), 1)]
    for number in range(2500):
        # processes that cannot be, and starts of some that can
        process, epoch = (f"engine {number}", 0) if number % 2 else (f"engine {number % 4}", number)
        data = encode_snapshot(Snapshot(process, epoch, 1, series, 6))
        hostile.send(encode(ProcessMetrics(process, epoch, 1, data, 6)))
    honest.exchange()
    assert coordinator.memory - before < GROWTH


def test_a_text_that_is_not_utf_8_does_not_end_the_coordinator(coordinator: CoordinatorProcess) -> None:
    honest = Honest(coordinator)
    hostile = coordinator.stranger(engine_identity(1, 0, 6))
    join = encode(EngineJoin(COORDINATOR_PROTOCOL_VERSION, 1, 0, 6, "tcp://127.0.0.1:5", {"name": "text"}))
    for damaged in (b"\xff\xfe\xfd\xfc", b"\xed\xa0\x80x", b"\xc0\x80\xc0\x80"):
        hostile.send(join.replace(b"text", damaged))
        hostile.send(join.replace(b"name", damaged))
    hostile.send(encode(EngineReport(1, 0, 0, 0, [])).replace(b"\x01", b"\xff"))
    honest.exchange()
    assert coordinator.alive


def test_long_messages_of_many_parts_are_refused(coordinator: CoordinatorProcess) -> None:
    honest = Honest(coordinator)
    hostile = coordinator.stranger(engine_identity(1, 0, 6))
    before = coordinator.memory
    for _ in range(50):
        hostile.send_multipart([bytes(1 << 16)] * 10)
        hostile.send_multipart([b""] * 1000)
    honest.exchange()
    assert coordinator.memory - before < GROWTH
    assert "bytes, at most" in coordinator.log


def test_a_member_that_reads_nothing_delays_nobody(coordinator: CoordinatorProcess) -> None:
    honest, fuzzer = Honest(coordinator), Fuzzer(3)
    deaf = [coordinator.stranger(server_identity(n, 0, HEAD)) for n in range(1, 9)]
    for n, each in enumerate(deaf, 1):
        each.send(encode(ServerJoin(COORDINATOR_PROTOCOL_VERSION, n, 0, HEAD)))
    before = coordinator.memory
    for _ in range(10):
        for _ in range(20):
            deaf[0].send(encode(fuzzer.metrics()))
        honest.exchange()
    assert coordinator.memory - before < GROWTH
