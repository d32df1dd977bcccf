"""Calls on engines, with engines that answer, are late, or go."""

import asyncio
from typing import Any

from penstock.api.calls import Calls, EngineAnswer
from penstock.wire.messages import Call, CallReply

LONG_S = 30.0


class Engines:
    """Notes what it is asked; ranks below ``connected`` can be reached."""

    def __init__(self, connected: int) -> None:
        self.asked: list[tuple[int, Call]] = []
        self._connected = connected

    def send(self, rank: int, call: Call) -> bool:
        if rank >= self._connected:
            return False
        self.asked.append((rank, call))
        return True


async def started(calls: Calls, ranks: list[int], timeout_s: float = LONG_S) -> Any:
    """A call that has been sent."""
    task = asyncio.ensure_future(calls.ask(ranks, "fly", {"high": True}, timeout_s=timeout_s))
    for _ in range(3):
        await asyncio.sleep(0)
    return task


def test_one_answer_of_each_in_the_order_asked() -> None:
    async def run() -> None:
        engines = Engines(2)
        calls = Calls(engines.send)
        task = await started(calls, [0, 1, 2])
        assert [rank for rank, _ in engines.asked] == [0, 1]
        (_, call) = engines.asked[0]
        assert (call.method, call.arguments) == ("fly", {"high": True})
        calls.replied(1, CallReply(call.call, "too heavy"))
        calls.replied(0, CallReply(call.call, None, {"height": 3}))
        assert await task == [
            EngineAnswer(0, {"height": 3}),
            EngineAnswer(1, None, "too heavy"),
            EngineAnswer(2, None, "not connected"),
        ]

    asyncio.run(run())


def test_an_engine_that_goes_or_is_late_does_not_hold_up_the_others() -> None:
    async def run() -> None:
        engines = Engines(3)
        calls = Calls(engines.send)
        task = await started(calls, [0, 1, 2], timeout_s=0.01)
        calls.replied(0, CallReply(engines.asked[0][1].call, None, "well"))
        calls.gone(1)
        assert await task == [
            EngineAnswer(0, "well"),
            EngineAnswer(1, None, "the engine is gone"),
            EngineAnswer(2, None, "no answer within 0.01 s"),
        ]
        calls.replied(2, CallReply(engines.asked[0][1].call, None, "at last"))  # nobody waits any more

    asyncio.run(run())


def test_answers_find_their_own_call() -> None:
    async def run() -> None:
        engines = Engines(1)
        calls = Calls(engines.send)
        first, second = await started(calls, [0]), await started(calls, [0])
        one, two = (call.call for _, call in engines.asked)
        assert one != two
        calls.replied(0, CallReply(two, None, "second"))
        calls.replied(0, CallReply(two, None, "twice"))
        calls.replied(0, CallReply(one, None, "first"))
        assert await first == [EngineAnswer(0, "first")]
        assert await second == [EngineAnswer(0, "second")]

    asyncio.run(run())
