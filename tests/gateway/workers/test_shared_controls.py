"""Control calls that workers share: the keeper knows what holds, and who goes on with what has begun."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from penstock.gateway.workers import control_calls, shared_controls
from penstock.gateway.workers.control_calls import MAX_CHAIN, MAX_REMEMBERED_KEYS, ControlCall, ControlEnd
from penstock.gateway.workers.shared_controls import KeeperSilent, SharedControls
from penstock.wire.messages import PAUSE, WEIGHTS
from tests.gateway.workers.linked import Gateway, gateway_of, know_each_other, until

CALL = ControlCall(PAUSE, "", "", "k", "/pause", b"", active=True)
UPDATE = ControlCall(WEIGHTS, "", "", "w", "/update_weights", b"{}", version="v")


def pause(key: str, target: str = "/pause") -> ControlCall:
    return msgspec.structs.replace(CALL, key=key, target=target)


class Worker:
    def __init__(self, gateway: Gateway, number: int, epoch: int = 0) -> None:
        self.link, _ = gateway.link(number, epoch)
        self.controls = SharedControls(self.link, timeout_s=5.0)
        self.missed: list[list[str]] = []
        self.taken_over: list[ControlCall] = []
        self.controls.on_news = self.missed.append
        self.controls.on_take_over = self.taken_over.append

    @property
    def keys(self) -> list[str]:
        return [call.key for call in self.controls.calls]

    async def make(self, call: ControlCall, *, settled: bool = True, missed: tuple[str, ...] = ()) -> str:
        """A call from its beginning to its end. That of an earlier one of the other worker may be on its
        way."""
        for _ in range(1000):
            refusal = await self.controls.begin(call)
            if "is under way" not in refusal:
                break
        if not refusal:
            self.controls.end(ControlEnd(call, settled, list(missed)))
        return refusal


@contextlib.asynccontextmanager
async def two(path: Path) -> AsyncIterator[tuple[Gateway, Worker, Worker]]:
    async with gateway_of(path) as gateway:
        first, second = Worker(gateway, 0), Worker(gateway, 1)
        await know_each_other(first.link, second.link)
        await until(lambda: first.controls.known.is_set() and second.controls.known.is_set())
        yield gateway, first, second


def test_all_know_what_holds_and_who_has_missed_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with two(tmp_path) as (gateway, first, second):
            assert not await first.make(CALL, missed=("http://a",))
            await until(lambda: first.keys == second.keys == ["k"])
            assert first.missed[-1] == second.missed[-1] == ["http://a"]
            assert not await second.make(UPDATE)
            await until(lambda: first.keys == ["k", "w"])
            assert not await second.make(pause("k2"))
            await until(lambda: first.keys == ["w", "k2"])
            assert not await second.make(pause("k3"), settled=False)
            late = Worker(gateway, 2)
            await late.link.open()
            await until(lambda: late.controls.known.is_set())
            assert late.keys == ["w", "k2"]

    asyncio.run(run())


def test_one_change_at_a_time_and_each_key_for_one(tmp_path: Path) -> None:
    async def run() -> None:
        async with two(tmp_path) as (_, first, second):
            assert not await first.controls.begin(CALL)
            assert not await second.controls.begin(CALL), "the same call again"
            assert "another query or body" in await second.controls.begin(pause("k", "/pause?mode=keep"))
            assert "is under way: /pause, Idempotency-Key 'k'" in await second.controls.begin(pause("x"))
            assert not await second.make(UPDATE), "of another state"
            # the one that gives up ends nothing for the other
            second.controls.end(ControlEnd(CALL, settled=False, missed=[]))
            assert "is under way" in await second.controls.begin(pause("x"))
            first.controls.end(ControlEnd(CALL, settled=True, missed=[]))
            assert not await first.make(CALL), "once more"
            assert not await second.make(pause("x"))
            assert "is that of an earlier change" in await first.make(CALL)
            for number in range(MAX_REMEMBERED_KEYS):
                assert not await first.make(pause(f"n{number}"))
            assert not await first.make(CALL), "forgotten"

    asyncio.run(run())


def test_parts_of_weights_are_kept_with_the_whole(tmp_path: Path) -> None:
    async def run() -> None:
        async with two(tmp_path) as (_, first, second):
            part = msgspec.structs.replace(UPDATE, whole=False)
            assert not await first.make(UPDATE)
            for number in range(MAX_CHAIN - 1):
                assert not await first.make(msgspec.structs.replace(part, key=f"p{number}"))
            await until(lambda: len(second.keys) == MAX_CHAIN)
            assert "send a whole one" in await first.make(part := msgspec.structs.replace(part, key="more"))
            assert not await first.make(msgspec.structs.replace(part, key="whole", whole=True))
            await until(lambda: second.keys == ["whole"])

    asyncio.run(run())


def test_another_goes_on_with_what_a_killed_worker_has_begun(tmp_path: Path) -> None:
    async def run() -> None:
        async with two(tmp_path) as (gateway, first, second):
            assert not await first.controls.begin(CALL)
            gateway.kill(first.link)
            await until(lambda: second.taken_over == [CALL])
            gateway.kill(second.link)
            third = Worker(gateway, 0, 1)
            await third.link.open()
            await until(lambda: third.taken_over == [CALL])
            third.controls.end(ControlEnd(CALL, settled=True, missed=[]))
            await until(lambda: third.keys == ["k"])
            assert not await third.make(pause("x"))

    asyncio.run(run())


def test_what_is_kept_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_controls, "MAX_KEPT_BYTES", 4 * control_calls.OVERHEAD_BYTES)

    async def run() -> None:
        async with two(tmp_path) as (_, first, _other):
            large = msgspec.structs.replace(UPDATE, body=b"x" * 2000)
            assert "would take more than" in await first.make(large)
            assert not await first.make(UPDATE)

    asyncio.run(run())


def test_a_keeper_that_hangs(tmp_path: Path) -> None:
    async def run() -> None:
        async with two(tmp_path) as (gateway, first, second):
            hasty = first.controls
            hasty._timeout_s = 0.01
            with gateway.hangs(), pytest.raises(KeeperSilent):
                await hasty.begin(CALL)
            assert not await second.make(pause("x")), "nothing is under way"

    asyncio.run(run())
