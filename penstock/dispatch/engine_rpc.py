"""Remote calls to engines: runs an operation once on each engine, between its steps, and returns receipts."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from penstock.wire.messages import RpcCall, RpcReply

EngineEpoch: TypeAlias = tuple[int, int]
"""Identifies a process of an engine: its restarts, and the run of its supervisor."""

log = logging.getLogger(__name__)


class OperationOutcome(enum.Enum):
    """In one word, how an operation on all engines ended."""

    DONE = "done"
    ABORTED = "aborted"
    """A state was set back, as it could not be applied or was not in time."""
    CONFLICT = "conflict"
    """Another change was in progress, or the key was used for something else."""
    UNDECIDED = "undecided"
    """The supervisor has not answered in time whether a state is set."""
    PARTIAL = "partial"
    """Some engines have failed. A state holds: they apply it as soon as they can."""


class Receipt(msgspec.Struct, frozen=True):
    """One engine's answer to a call or to the change of a state, or the reason why there is none."""

    rank: int
    epoch: int | None = None
    """The engine's restarts; None if it was not reached."""
    step: int | None = None
    """Steps that the engine had published when the call ran; None unless the call is known to have run."""
    repeated: bool = False
    """The call ran earlier, with the same key; the state was set by an earlier request."""
    restarted: bool = False
    """The engine restarted during the call; whether its previous process ran the call is unknown."""
    result: Any = None
    error: str | None = None
    code: str = ""
    """With an error: ``timeout``, ``gone``, ``restarted``, or the engine's code."""


@dataclass(frozen=True, slots=True)
class OperationResult:
    """How an operation on all engines ended."""

    outcome: OperationOutcome
    receipts: list[Receipt]
    """One per engine, ordered by rank; none if no engine was asked."""
    reason: str = ""
    """Why no engine was asked."""


@dataclass(frozen=True, slots=True)
class RpcRequest:
    """A call without its number, see :class:`RpcCall`.

    Without a key, the call is sent once, and fails if the engine is not connected. With a key, it is sent
    again whenever the engine reconnects: an engine that has run it answers with the first result. After a
    restart of the engine it is sent again only with ``after_restart``.
    """

    method: str
    arguments: dict[str, Any]
    key: str = ""
    after_restart: bool = True

    @property
    def patient(self) -> bool:
        """Whether to wait for an engine that is not connected."""
        return bool(self.key)


class Calls:
    """The pending calls of one API server.

    ``send`` sends a call to an engine, by rank, that is connected.
    """

    def __init__(self, send: Callable[[int, RpcCall], None]) -> None:
        self._send = send
        self._next = 0
        self._open: dict[tuple[int, int], asyncio.Future[RpcReply | None]] = {}
        """Futures of the replies, by rank and number of the call."""
        self._connected: dict[int, EngineEpoch] = {}
        """Connected engines, by rank."""
        self._awaited: dict[int, asyncio.Future[None]] = {}
        """Futures of connections that calls wait for, by rank."""

    async def ask(self, ranks: Sequence[int], request: RpcRequest, timeout_s: float) -> list[Receipt]:
        """Call the engines of ``ranks`` concurrently; return their receipts in the same order."""
        asks = (self.ask_one(rank, request, timeout_s) for rank in ranks)
        return list(await asyncio.gather(*asks))

    async def ask_one(self, rank: int, request: RpcRequest, timeout_s: float) -> Receipt:
        """Call one engine."""
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
            restarted = attempt.on_connected(await self._connection(rank))
            if restarted and not request.after_restart:
                return attempt.without("the engine was started again before it answered", "restarted")
            reply = await self._reply(rank, request)
            if reply is not None:
                return attempt.answered(reply)
            if not request.patient:
                return attempt.without("the engine is gone", "gone")

    async def _connection(self, rank: int) -> EngineEpoch:
        """Wait until the engine is connected; return its process."""
        while rank not in self._connected:
            future = self._awaited.get(rank)
            if future is None:
                future = self._awaited[rank] = asyncio.get_running_loop().create_future()
            await asyncio.shield(future)  # other calls may wait for it, too
        return self._connected[rank]

    async def _reply(self, rank: int, request: RpcRequest) -> RpcReply | None:
        """Send the call; None if the connection broke before the reply."""
        self._next += 1
        call = RpcCall(
            call=self._next,
            method=request.method,
            arguments=request.arguments,
            key=request.key,
        )
        future: asyncio.Future[RpcReply | None] = asyncio.get_running_loop().create_future()
        self._open[rank, call.call] = future
        try:
            self._send(rank, call)
            return await future
        finally:
            del self._open[rank, call.call]

    # -- events of engines

    def on_connected(self, rank: int, epoch: int, incarnation: int = 0) -> None:
        """An engine accepted a connection."""
        self._connected[rank] = epoch, incarnation
        future = self._awaited.pop(rank, None)
        if future is not None:
            future.set_result(None)

    def on_disconnected(self, rank: int) -> None:
        """The connection to an engine broke: its pending calls get no reply."""
        self._connected.pop(rank, None)
        for (asked, _), future in self._open.items():
            if asked == rank and not future.done():
                future.set_result(None)

    def on_reply(self, rank: int, reply: RpcReply) -> None:
        """An engine answered a call."""
        future = self._open.get((rank, reply.call))
        if future is None:
            log.debug("engine %d answered call %d too late", rank, reply.call)
        elif not future.done():
            future.set_result(_presentable(reply))


def _presentable(reply: RpcReply) -> RpcReply:
    """The reply, as an error if its result cannot be part of an HTTP reply."""
    try:
        msgspec.json.encode(reply.result)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        problem = f"the engine's result is no JSON value: {error}"
        return msgspec.structs.replace(reply, result=None, error=problem)
    return reply


class _Attempt:
    """One call to one engine, over all its connections until there is a receipt."""

    def __init__(self, rank: int, request: RpcRequest) -> None:
        self.rank = rank
        self.request = request
        self._engine_epoch: EngineEpoch | None = None
        """The process that the call was sent to last."""
        self._restarted = False

    @property
    def _epoch(self) -> int | None:
        return None if self._engine_epoch is None else self._engine_epoch[0]

    def on_connected(self, engine_epoch: EngineEpoch) -> bool:
        """Note the process that the call is sent to; return whether it is another one than before."""
        restarted = self._engine_epoch not in (None, engine_epoch)
        self._engine_epoch = engine_epoch
        self._restarted |= restarted
        return restarted

    def answered(self, reply: RpcReply) -> Receipt:
        step = None if reply.error is not None else reply.step
        return Receipt(
            rank=self.rank,
            epoch=self._epoch,
            step=step,
            repeated=reply.repeated,
            restarted=self._restarted,
            result=reply.result,
            error=reply.error,
            code=reply.code,
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
