"""Calls on engines, with engines that answer, are late, go, or come back."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from penstock.dispatch.engine_rpc import Calls, Receipt, RpcRequest
from penstock.wire.messages import RpcCall, RpcReply

LONG_S = 30.0
SOON_S = 0.01
FLY = RpcRequest("fly", {"high": True})
KEYED = RpcRequest("fly", {"high": True}, "k")


class Engines:
    """Notes what it is asked."""

    def __init__(self, connected: int, epoch: int = 0) -> None:
        self.asked: list[tuple[int, RpcCall]] = []
        self.calls = Calls(lambda rank, call: self.asked.append((rank, call)))
        for rank in range(connected):
            self.calls.on_connected(rank, epoch)

    async def started(
        self, ranks: list[int], request: RpcRequest = FLY, timeout_s: float = LONG_S
    ) -> asyncio.Task[list[Receipt]]:
        """A call that has been sent."""
        task = asyncio.ensure_future(self.calls.ask(ranks, request, timeout_s))
        await turn()
        return task

    def answer(self, place: int, *reply: Any) -> None:
        rank, call = self.asked[place]
        self.calls.on_reply(rank, RpcReply(call.call, *reply))


async def turn() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_result_that_is_no_json_is_an_error() -> None:
    async def run() -> None:
        engines = Engines(1)
        task = await engines.started([0])
        engines.answer(0, None, {"a": msgspec.msgpack.Ext(5, b"x")})
        (receipt,) = await task
        assert receipt.result is None
        assert "no JSON value" in (receipt.error or "")

    asyncio.run(run())


def test_one_receipt_of_each_in_the_order_asked() -> None:
    async def run() -> None:
        engines = Engines(2, epoch=3)
        task = await engines.started([0, 1, 2])
        assert [rank for rank, _ in engines.asked] == [0, 1]
        (_, call) = engines.asked[0]
        assert (call.method, call.arguments) == ("fly", {"high": True})
        engines.answer(1, "too heavy", None, 4, False, "conflict")
        engines.answer(0, None, {"height": 3}, 9)
        assert await task == [
            Receipt(0, 3, 9, result={"height": 3}),
            Receipt(1, 3, error="too heavy", code="conflict"),
            Receipt(2, error="not connected", code="gone"),
        ]

    asyncio.run(run())


def test_an_engine_that_goes_or_is_late_does_not_hold_up_the_others() -> None:
    async def run() -> None:
        engines = Engines(3)
        task = await engines.started([0, 1, 2], timeout_s=SOON_S)
        engines.answer(0, None, "well", 1)
        engines.calls.on_disconnected(1)
        assert await task == [
            Receipt(0, 0, 1, result="well"),
            Receipt(1, 0, error="the engine is gone", code="gone"),
            Receipt(2, 0, error="no answer within 0.01 s", code="timeout"),
        ]
        engines.answer(2, None, "at last")  # nobody waits any more

    asyncio.run(run())


def test_answers_find_their_own_call() -> None:
    async def run() -> None:
        engines = Engines(1)
        first, second = await engines.started([0]), await engines.started([0])
        engines.answer(1, None, "second", 1)
        engines.answer(1, None, "twice", 1)
        engines.answer(0, None, "first", 1)
        assert await first == [Receipt(0, 0, 1, result="first")]
        assert await second == [Receipt(0, 0, 1, result="second")]

    asyncio.run(run())


# -- with a key


def test_asked_again_with_the_same_key_over_a_new_connection() -> None:
    async def run() -> None:
        engines = Engines(1)
        task = await engines.started([0], KEYED)
        engines.calls.on_disconnected(0)
        await turn()
        assert len(engines.asked) == 1
        engines.calls.on_connected(0, 0)
        await turn()
        assert [call.key for _, call in engines.asked] == ["k", "k"]
        engines.answer(0, None, "of the connection that broke")
        engines.answer(1, None, "done", 5, True)
        assert await task == [Receipt(0, 0, 5, True, result="done")]

    asyncio.run(run())


def test_an_engine_that_was_away_is_asked_when_it_is_there() -> None:
    async def run() -> None:
        engines = Engines(0)
        one, two = await engines.started([0], KEYED), await engines.started([0], KEYED)
        engines.calls.on_connected(0, 2)
        await turn()
        engines.answer(0, None, None, 1)
        engines.answer(1, None, None, 1, True)
        assert await one == [Receipt(0, 2, 1)]
        assert await two == [Receipt(0, 2, 1, True)]

    asyncio.run(run())


def test_what_a_restart_resets_is_asked_again() -> None:
    async def run() -> None:
        engines = Engines(1)
        task = await engines.started([0], KEYED)
        engines.calls.on_disconnected(0)
        engines.calls.on_connected(0, 1)
        await turn()
        engines.answer(1, None, "done", 2)
        assert await task == [Receipt(0, 1, 2, restarted=True, result="done")]

    asyncio.run(run())


def test_what_it_does_not_is_reported() -> None:
    async def run() -> None:
        engines = Engines(1)
        task = await engines.started([0], RpcRequest("fly", {}, "k", after_restart=False))
        engines.calls.on_disconnected(0)
        engines.calls.on_connected(0, 1)
        [receipt] = await task
        assert (receipt.restarted, receipt.code, receipt.epoch) == (True, "restarted", 1)
        assert receipt.error == "the engine was started again before it answered"
        assert len(engines.asked) == 1

    asyncio.run(run())


def test_the_time_holds_for_all_attempts_together() -> None:
    async def run() -> None:
        engines = Engines(1)
        never = await engines.started([1], KEYED, SOON_S)
        lost = await engines.started([0], KEYED, SOON_S)
        engines.calls.on_disconnected(0)
        assert [receipt.error for receipt in await never + await lost] == [
            "not connected within 0.01 s",
            "the engine went before it answered, and was not back within 0.01 s",
        ]

    asyncio.run(run())
