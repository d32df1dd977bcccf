"""Operations that run once on every engine, between its steps, with a receipt from each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from penstock.wire.messages import RpcCall, RpcPhase, RpcReply

EngineEpoch: TypeAlias = tuple[int, int]
"""Tells an engine's processes apart: how often it was restarted, and by which run of its supervisor."""

log = logging.getLogger(__name__)


class Receipt(msgspec.Struct, frozen=True):
    """What one engine said to a call, or why it said nothing."""

    rank: int
    epoch: int | None = None
    """How often it had been started again; None when it was not reached."""
    step: int | None = None
    """Steps that it had published when the call ran; None when it did not run, as far as is known."""
    repeated: bool = False
    """It ran for an earlier call with the same key."""
    restarted: bool = False
    """The engine was started again while it was asked: what the process before it did is not known."""
    result: Any = None
    error: str | None = None
    code: str = ""
    """With an error: ``timeout``, ``gone``, ``restarted``, or what the engine says."""


@dataclass(frozen=True, slots=True)
class RpcRequest:
    """What to call an engine with, see :class:`RpcCall`.

    Without a key an engine is asked once, and one that is away has no answer. With a key one that is away,
    or whose connection breaks, is asked when it is there (again): if it has run the call, it answers with the
    receipt. If it was started again meanwhile, it runs the call only when ``after_restart``.
    """

    method: str
    arguments: dict[str, Any]
    key: str = ""
    phase: RpcPhase = RpcPhase.RUN
    version: int = 0
    after_restart: bool = True

    @property
    def patient(self) -> bool:
        """Whether it is worth waiting for an engine that is away; what one that is gone had prepared is gone
        with it."""
        return bool(self.key) and self.phase is not RpcPhase.ABORT


class Calls:
    """The calls of one API server that wait for their answers.

    ``send`` hands a call to an engine that is connected.
    """

    def __init__(self, send: Callable[[int, RpcCall], None]) -> None:
        self._send = send
        self._next = 0
        self._open: dict[tuple[int, int], asyncio.Future[RpcReply | None]] = {}
        """By rank and number of the call."""
        self._connected: dict[int, EngineEpoch] = {}
        """The engines that are connected, by rank."""
        self._awaited: dict[int, asyncio.Future[None]] = {}
        """Ranks that somebody waits for."""
        self._on_connected: Callable[[int], None] = lambda rank: None

    async def ask(self, ranks: Sequence[int], request: RpcRequest, timeout_s: float) -> list[Receipt]:
        """Asks every engine of ``ranks`` at the same time: a receipt of each, in their order."""
        asks = (self.ask_one(rank, request, timeout_s) for rank in ranks)
        return list(await asyncio.gather(*asks))

    async def ask_one(self, rank: int, request: RpcRequest, timeout_s: float) -> Receipt:
        attempt = _Attempt(rank, request)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._ask(attempt)
        except TimeoutError:
            return attempt.expired(timeout_s, connected=rank in self._connected)

    async def _ask(self, attempt: _Attempt) -> Receipt:
        rank, request = attempt.rank, attempt.request
        if not request.patient and rank not in self._connected:
            return attempt.without("not connected", "gone")
        while True:
            if attempt.restarts(await self._connection(rank)) and not request.after_restart:
                return attempt.without("the engine was started again before it answered", "restarted")
            reply = await self._reply(rank, request)
            if reply is not None:
                return attempt.answered(reply)
            if not request.patient:
                return attempt.without("the engine is gone", "gone")

    async def _connection(self, rank: int) -> EngineEpoch:
        """Waits until the engine is connected."""
        while rank not in self._connected:
            future = self._awaited.get(rank)
            if future is None:
                future = self._awaited[rank] = asyncio.get_running_loop().create_future()
            await asyncio.shield(future)  # others wait for it, too
        return self._connected[rank]

    async def _reply(self, rank: int, request: RpcRequest) -> RpcReply | None:
        """None when the connection broke before the answer."""
        self._next += 1
        call = RpcCall(
            self._next,
            request.method,
            request.arguments,
            request.key,
            request.phase,
            request.version,
        )
        place = rank, call.call
        future: asyncio.Future[RpcReply | None] = asyncio.get_running_loop().create_future()
        self._open[place] = future
        try:
            self._send(rank, call)
            return await future
        finally:
            del self._open[place]

    # -- what becomes known of engines

    def listen(self, on_connected: Callable[[int], None]) -> None:
        """Names who is told of every connection, before anything else happens on it."""
        self._on_connected = on_connected

    def connected(self, rank: int, epoch: int, incarnation: int = 0) -> None:
        self._connected[rank] = epoch, incarnation
        self._on_connected(rank)
        future = self._awaited.pop(rank, None)
        if future is not None:
            future.set_result(None)

    def gone(self, rank: int) -> None:
        """The connection to an engine broke: it does not answer what it was asked."""
        self._connected.pop(rank, None)
        for (asked, _), future in self._open.items():
            if asked == rank and not future.done():
                future.set_result(None)

    def replied(self, rank: int, reply: RpcReply) -> None:
        """An engine answered."""
        future = self._open.get((rank, reply.call))
        if future is None:
            log.debug("engine %d answered call %d too late", rank, reply.call)
        elif not future.done():
            future.set_result(reply)


class _Attempt:
    """A question to one engine, over all its connections until there is a receipt."""

    def __init__(self, rank: int, request: RpcRequest) -> None:
        self.rank = rank
        self.request = request
        self._engine_epoch: EngineEpoch | None = None
        """The process that was asked last."""
        self._restarted = False

    @property
    def _epoch(self) -> int | None:
        return None if self._engine_epoch is None else self._engine_epoch[0]

    def restarts(self, life: EngineEpoch) -> bool:
        """It is asked now; whether that is another process than before."""
        restarts = self._engine_epoch not in (None, life)
        self._engine_epoch = life
        self._restarted |= restarts
        return restarts

    def answered(self, reply: RpcReply) -> Receipt:
        step = None if reply.error is not None else reply.step
        return Receipt(
            self.rank,
            self._epoch,
            step,
            reply.repeated,
            self._restarted,
            reply.result,
            reply.error,
            reply.code,
        )

    def expired(self, timeout_s: float, *, connected: bool) -> Receipt:
        within = f"within {timeout_s:g} s"
        if connected:
            return self.without(f"no answer {within}", "timeout")
        if self._epoch is None:
            return self.without(f"not connected {within}", "timeout")
        return self.without(f"the engine went before it answered, and was not back {within}", "timeout")

    def without(self, error: str, code: str) -> Receipt:
        return Receipt(self.rank, self._epoch, restarted=self._restarted, error=error, code=code)
