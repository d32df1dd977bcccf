"""Where an API server looks for its engines, and what it makes of their going."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
import zmq

from penstock.dispatch import connections
from penstock.dispatch.connections import Connections, EngineState
from penstock.wire.curve import ClusterKey
from penstock.wire.decoding import decode_from_server
from penstock.wire.frames import TokenFrame
from penstock.wire.messages import (
    ENGINE_PROTOCOL_VERSION,
    EngineInfo,
    EngineMetricsQuery,
    FromEngine,
    GoAway,
    Hello,
    Welcome,
    encode,
)
from penstock.wire.sockets import EngineLink, RouterSocket, engine_address

PATIENCE_S = 60.0
INFO = EngineInfo("fake", 100, 100, 8)
KEY = ClusterKey.generate()


class FakeEngine:
    """Answers every Hello with Welcome."""

    def __init__(self, address: str, key: ClusterKey | None = None) -> None:
        self.socket = RouterSocket(address, key=key)
        self.peers: list[tuple[bytes, Hello]] = []

    def look(self) -> None:
        while (received := self.socket.receive()) is not None:
            identity, parts = received
            hello = decode_from_server(parts[0])
            if isinstance(hello, Hello):
                self.peers.append((identity, hello))
                self.say(Welcome(ENGINE_PROTOCOL_VERSION, 0, 0, INFO))

    def say(self, message: Welcome | GoAway) -> None:
        assert self.socket.send(self.peers[-1][0], [encode(message)])


class Records:
    """A receiver that notes what comes."""

    def __init__(self) -> None:
        self.connections: Connections
        self.messages: list[FromEngine] = []
        self.losses: list[str] = []

    def on_frames(self, engine: EngineState, frames: list[TokenFrame], now: float) -> None:
        raise AssertionError("no frames come")

    def on_message(self, engine: EngineState, message: FromEngine) -> None:
        self.messages.append(message)

    def on_gone(self, engine: EngineState, reason: str) -> None:
        self.connections.disconnect(engine, reason)

    def on_lost(self, engine: EngineState, reason: str, accepted: int) -> None:
        self.losses.append(reason)

    def on_fault(self, *arguments: object, **how: object) -> None:
        raise AssertionError(arguments)


class Bench:
    """One engine's place, and engines to be found there."""

    def __init__(self, stack: ExitStack, places: dict[int, str]) -> None:
        self._stack = stack
        self.records = Records()
        self.connections = self.records.connections = Connections(
            1, places, Hello(ENGINE_PROTOCOL_VERSION, 3, 1, 7), KEY, self.records
        )
        self.engines: list[FakeEngine] = []

    def start(self, address: str) -> FakeEngine:
        engine = FakeEngine(address, KEY if address.startswith("tcp") else None)
        self._stack.enter_context(closing(engine.socket))
        self.engines.append(engine)
        return engine

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                for engine in self.engines:
                    engine.look()
                await asyncio.sleep(0.002)

    async def welcomes(self, count: int) -> None:
        await self.until(lambda: len(self.records.messages) == count)


Scenario = Callable[[Bench], Awaitable[None]]
Run = Callable[[Scenario, dict[int, str]], None]


@pytest.fixture
def run() -> Iterator[Run]:
    with ExitStack() as stack:

        def run(scenario: Scenario, places: dict[int, str]) -> None:
            async def main() -> None:
                bench = Bench(stack, places)
                bench.connections.open()
                try:
                    await scenario(bench)
                finally:
                    bench.connections.close("the test is over")

            asyncio.run(main())

        yield run


def test_every_connection_is_another_peer(run: Run, run_dir: str) -> None:
    address = engine_address(run_dir, 0)

    async def scenario(bench: Bench) -> None:
        first = bench.start(address)
        await bench.welcomes(1)
        first.say(GoAway("over"))
        await bench.welcomes(2)
        first.socket.close()
        bench.engines.remove(first)
        await bench.until(lambda: bool(bench.records.losses))
        second = bench.start(address)
        await bench.welcomes(3)
        hellos = [hello for engine in (first, second) for _, hello in engine.peers]
        assert [hello.connection for hello in hellos] == sorted({hello.connection for hello in hellos})
        assert {(hello.server, hello.epoch, hello.incarnation) for hello in hellos} == {(3, 1, 7)}
        assert len({identity for engine in (first, second) for identity, _ in engine.peers}) == 2

    run(scenario, {0: address})


def test_an_engine_without_a_place_is_not_looked_for(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        (engine,) = bench.connections.engines
        assert (engine.link, engine.host) == (None, "")
        there = bench.start("tcp://127.0.0.1:*")
        bench.connections.set_address(0, there.socket.address)
        await bench.welcomes(1)
        assert engine.host == "127.0.0.1"

    run(scenario, {})


def test_an_engine_that_moves_is_followed(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        here, there = bench.start("tcp://127.0.0.1:*"), bench.start("tcp://127.0.0.1:*")
        bench.connections.set_address(0, here.socket.address)
        await bench.welcomes(1)
        bench.connections.set_address(0, here.socket.address)
        assert bench.records.losses == [], "it is where it was"
        bench.connections.set_address(0, there.socket.address)
        assert bench.records.losses == ["The engine that ran this request was replaced."]
        await bench.welcomes(2)
        assert (len(here.peers), len(there.peers)) == (1, 1)

    run(scenario, {})


def test_an_engine_that_leaves_may_finish_and_is_not_looked_for_again(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        there = bench.start("tcp://127.0.0.1:*")
        bench.connections.set_address(0, there.socket.address)
        await bench.welcomes(1)
        bench.connections.set_address(0, None)
        (engine,) = bench.connections.engines
        assert engine.link is not None
        assert bench.records.losses == []
        bench.connections.disconnect(engine, "over")
        again = bench.start("tcp://127.0.0.1:*")
        bench.connections.set_address(0, again.socket.address)
        await bench.welcomes(2)
        assert (len(there.peers), len(again.peers)) == (1, 1)

    run(scenario, {})


def test_a_hello_that_is_not_answered_is_said_again_on_another_connection(
    run: Run, run_dir: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when another process has this one's identity at the engine."""
    monkeypatch.setattr(connections, "WELCOME_TIMEOUT_S", 0.3)
    monkeypatch.setattr(connections, "CHECK_INTERVAL_S", 0.02)
    place = engine_address(run_dir, 0)

    async def scenario(bench: Bench) -> None:
        with closing(RouterSocket(place)) as silent:
            bench.connections.open()
            peers = set()
            for _ in range(2):
                await bench.until(lambda: silent.wait(0))
                identity, _ = silent.receive() or (b"", [])
                peers.add(identity)
            assert len(peers) == 2
        bench.start(place)
        await bench.welcomes(1)
        assert "engine 0 does not answer" in caplog.text

    run(scenario, {0: place})


def test_a_message_that_came_before_a_send_is_received_without_the_timer(
    run: Run, run_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sending consumes the edge of the descriptor that announces the message."""
    monkeypatch.setattr(connections, "CHECK_INTERVAL_S", 3600.0)
    address = engine_address(run_dir, 0)

    async def scenario(bench: Bench) -> None:
        engine = bench.start(address)
        await bench.welcomes(1)
        link = bench.connections.engines[0].link
        assert link is not None
        expected = 1
        for count in (1, connections.MESSAGE_PARTS + 1):
            engine.say(Welcome(ENGINE_PROTOCOL_VERSION, 0, 0, INFO))
            assert select.select([link.fd], [], [], PATIENCE_S)[0]
            for _ in range(count):
                bench.connections.send(bench.connections.engines[0], encode(EngineMetricsQuery(1)))
            expected += 1
            await bench.welcomes(expected)

    run(scenario, {0: address})


def test_a_connection_that_cannot_be_made_is_tried_again(
    run: Run, run_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, refusals = engine_address(run_dir, 0), []

    def refuse_twice(*arguments: Any) -> EngineLink:
        if len(refusals) < 2:
            refusals.append(arguments)
            raise zmq.ZMQError(24, "Too many open files")
        return EngineLink(*arguments)

    monkeypatch.setattr("penstock.dispatch.connections.EngineLink", refuse_twice)
    monkeypatch.setattr("penstock.dispatch.connections.RECONNECT_S", 0.001)

    async def scenario(bench: Bench) -> None:
        bench.start(address)
        await bench.welcomes(1)

    run(scenario, {0: address})
