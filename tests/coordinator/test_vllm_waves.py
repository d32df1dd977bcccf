"""Waves of engines that step together, against the rules of vLLM's engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from penstock.coordinator.vllm_waves import VllmWaves

RANKS = 3
Context = zmq.Context[zmq.Socket[bytes]]


class Engine:
    """As DPEngineCoreProc: subscribes, waits for READY, runs waves."""

    def __init__(self, context: Context, ports: tuple[int, int], rank: int) -> None:
        self.rank = rank
        self.wave, self.running, self.ready = 0, False, False
        self.subscribed = context.socket(zmq.XSUB)
        self.reports = context.socket(zmq.PUSH)
        for socket, port in zip((self.subscribed, self.reports), ports, strict=True):
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(f"tcp://127.0.0.1:{port}")
        self.subscribed.send(b"\x01")

    def report(self, **fields: int) -> None:
        message: list[Any] = [self.rank, [], None, 1.0, None, None, None, None, None]
        for name, place in (("wave_complete", 6), ("start_wave", 7)):
            message[place] = fields.get(name)
        self.reports.send(msgspec.msgpack.encode(message))

    def add_request(self) -> None:
        """With the wave -1, as Penstock sends them."""
        if not self.running:
            self.running = True
            self.report(start_wave=self.wave)

    def end_wave(self) -> None:
        """All engines end it in the same step; the first one reports."""
        if self.rank == 0:
            self.report(wave_complete=self.wave)
        self.running = False
        self.wave += 1

    def read(self) -> None:
        while self.subscribed.poll(0):
            kind, *frames = self.subscribed.recv_multipart()
            if kind == b"READY":
                self.ready = True
                continue
            assert kind == b"\x02"
            wave, excluded = msgspec.msgpack.decode(frames[0])
            if excluded != self.rank and wave >= self.wave:
                self.wave, self.running = wave, True

    def close(self) -> None:
        self.subscribed.close()
        self.reports.close()


class Group:
    def __init__(self, context: Context) -> None:
        self.waves = VllmWaves(context, "127.0.0.1", 0, RANKS)
        self.context = context
        self.engines: list[Engine] = []

    def start(self, rank: int) -> None:
        self.engines.append(Engine(self.context, self.waves.ports, rank))

    def until(self, condition: Any) -> None:
        poller = zmq.Poller()
        for socket in (*self.waves.wakeups, *(engine.subscribed for engine in self.engines)):
            poller.register(socket, zmq.POLLIN)
        for _ in range(100):
            self.waves.run_once()
            for engine in self.engines:
                engine.read()
            if condition():
                return
            poller.poll(100)
        raise AssertionError("nothing happened")

    def all_run(self) -> bool:
        return all(engine.running for engine in self.engines)


@pytest.fixture
def group() -> Iterator[Group]:
    context: Context = zmq.Context()
    made = Group(context)
    yield made
    for engine in made.engines:
        engine.close()
    made.waves.close()
    context.term()


def start_all(group: Group) -> None:
    for rank in range(RANKS):
        group.start(rank)
    group.until(lambda: all(engine.ready for engine in group.engines))


def test_ready_comes_when_all_have_subscribed(group: Group) -> None:
    for rank in range(RANKS - 1):
        group.start(rank)
    group.until(lambda: group.waves._subscribed == RANKS - 1)
    assert not any(engine.ready for engine in group.engines)
    group.start(RANKS - 1)
    group.until(lambda: all(engine.ready for engine in group.engines))


def test_a_request_at_any_engine_starts_a_wave_of_all(group: Group) -> None:
    start_all(group)
    for wave, rank in enumerate((1, 0, 2, 2)):
        group.engines[rank].add_request()
        group.until(group.all_run)
        assert [engine.wave for engine in group.engines] == [wave] * RANKS
        for engine in group.engines:
            engine.end_wave()


def test_a_request_between_a_waves_end_and_its_report(group: Group) -> None:
    """The engine that has it reports the next wave before the first one has told of the end of this one."""
    start_all(group)
    group.engines[1].add_request()
    group.until(group.all_run)
    for engine in reversed(group.engines[1:]):
        engine.end_wave()
    group.engines[2].add_request()
    group.engines[0].end_wave()
    group.until(group.all_run)
    assert [engine.wave for engine in group.engines] == [1] * RANKS


def test_a_restarted_group_counts_anew(group: Group) -> None:
    start_all(group)
    for _ in range(3):
        group.engines[0].add_request()
        group.until(group.all_run)
        for engine in group.engines:
            engine.end_wave()
    for engine in group.engines:
        engine.close()
    group.engines.clear()
    group.until(lambda: group.waves._subscribed == 0)
    start_all(group)
    group.engines[1].add_request()
    group.until(group.all_run)
    assert [engine.wave for engine in group.engines] == [0] * RANKS


def test_reports_that_cannot_be_understood_are_ignored(group: Group) -> None:
    start_all(group)
    for garbage in (b"", b"\xc1", b"\x91" * 5000, msgspec.msgpack.encode({"wave_complete": 1})):
        group.engines[2].reports.send(garbage)
    group.engines[2].add_request()
    group.until(group.all_run)
