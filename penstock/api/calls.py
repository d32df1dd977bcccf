"""Operations that run once on every engine, between its steps, with an answer from each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ..wire.messages import Call, CallReply

log = logging.getLogger(__name__)


class EngineAnswer(msgspec.Struct, frozen=True):
    """What one engine said to a call: a result, or why there is none."""

    rank: int
    result: Any = None
    error: str | None = None


class Calls:
    """The calls of one API server that wait for their answers.

    ``send`` hands a call to an engine, False when that is not connected.
    """

    def __init__(self, send: Callable[[int, Call], bool]) -> None:
        self._send = send
        self._next = 0
        self._open: dict[tuple[int, int], asyncio.Future[CallReply]] = {}
        """By rank and number of the call."""

    async def ask(
        self, ranks: Sequence[int], method: str, arguments: dict[str, Any] | None = None, *, timeout_s: float
    ) -> list[EngineAnswer]:
        """Calls ``method`` on every engine of ``ranks`` at the same time: an answer of each, in their order.

        It is an error for an engine that is away, ends meanwhile, fails, or takes longer than ``timeout_s``.
        """
        self._next += 1
        call = Call(self._next, method, arguments or {})
        return list(await asyncio.gather(*(self._ask(rank, call, timeout_s) for rank in ranks)))

    async def _ask(self, rank: int, call: Call, timeout_s: float) -> EngineAnswer:
        if not self._send(rank, call):
            return EngineAnswer(rank, error="not connected")
        key = rank, call.call
        future = self._open[key] = asyncio.get_running_loop().create_future()
        try:
            reply = await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            return EngineAnswer(rank, error=f"no answer within {timeout_s:g} s")
        finally:
            del self._open[key]
        return EngineAnswer(rank, reply.result, reply.error)

    def replied(self, rank: int, reply: CallReply) -> None:
        """An engine answered."""
        future = self._open.get((rank, reply.call))
        if future is None:
            log.debug("engine %d answered call %d too late", rank, reply.call)
        elif not future.done():
            future.set_result(reply)

    def gone(self, rank: int) -> None:
        """The connection to an engine broke: it answers no more."""
        for (asked, number), future in self._open.items():
            if asked == rank and not future.done():
                future.set_result(CallReply(number, "the engine is gone"))
