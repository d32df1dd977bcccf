"""States that all engines agree on: how they are changed, and how engines get there.

The supervisor keeps the agreed states and tells every API server. Each API server asks every engine to make
the decided changes, by calls with the same keys, so that an engine makes each of them once whoever asks. An
engine that has not confirmed them gets no streams.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.dispatch.connections import EngineState
from penstock.dispatch.engine_client import Fleet
from penstock.dispatch.engine_rpc import Question, Receipt
from penstock.dispatch.two_phase_change import Change, Stage
from penstock.wire.control import AgreedState, AgreedStates, ProposeState
from penstock.wire.messages import CallPhase

log = logging.getLogger(__name__)

SLEEP = "sleep"
ABORT_S = 2.0
"""How long an engine that does not answer keeps the report of a change that was given up."""
SETTLE_S = 30.0
"""How long an engine is waited for before it is asked again to make a decided change."""
RETRY_S = 1.0
"""Time between a failure to make a decided change and the next attempt."""


@dataclass(slots=True, eq=False)
class _Open:
    """A change that this API server was asked for."""

    change: Change
    name: str
    key: str
    base: int
    """Version of the state that it started from."""
    version: int = 0
    """Of the state that it led to."""
    happened: asyncio.Event = field(default_factory=asyncio.Event)


class Agreement:
    """``propose`` and ``confirm`` speak to the supervisor, which answers through :meth:`told`."""

    def __init__(
        self, fleet: Fleet, propose: Callable[[ProposeState], None], confirm: Callable[[int], None]
    ) -> None:
        self._fleet = fleet
        self._calls = fleet.calls
        self._propose = propose
        self._confirm = confirm
        self._revision = self._adopted = 0
        self._states: dict[str, AgreedState] = {}
        self._open: list[_Open] = []
        self._settling: dict[int, asyncio.Task[None]] = {}
        """By rank."""
        self._calls.listen(self._settle)

    @property
    def _sleeping(self) -> bool:
        state = self._states.get(SLEEP)
        return state is not None and state.arguments["level"] > 0

    # -- a change

    async def change(self, name: str, arguments: dict[str, Any], key: str, timeout_s: float) -> Change:
        """Changes a state of all engines; returns the change when it has an outcome.

        Preparing takes ``timeout_s`` at most, and so does what follows.
        """
        ranks = self._fleet.members()
        change = Change(ranks)
        entry = _Open(change, name, key, self._version(name))
        self._open.append(entry)
        try:
            if self._is_agreed(name, key, arguments):
                await self._repeat(entry, ranks, timeout_s)
            else:
                question = Question(name, arguments, key, CallPhase.PREPARE)
                await self._prepare(change, ranks, question, timeout_s)
            if change.stage is Stage.DECIDE:
                self._propose(ProposeState(name=name, key=key, base=entry.base, arguments=arguments))
            async with asyncio.timeout(timeout_s):
                while change.stage is not Stage.DONE:
                    await entry.happened.wait()
                    entry.happened.clear()
        except TimeoutError:
            change.expired()
        finally:
            self._open.remove(entry)
        if change.must_abort:
            await self._calls.ask(ranks, Question(name, arguments, key, CallPhase.ABORT), ABORT_S)
        return change

    def _is_agreed(self, name: str, key: str, arguments: dict[str, Any]) -> bool:
        """Whether the latest change of the state is this one."""
        state = self._states.get(name)
        return state is not None and (state.key, state.arguments) == (key, arguments)

    async def _repeat(self, entry: _Open, ranks: list[int], timeout_s: float) -> None:
        """The change is decided already: gather its receipts."""
        entry.change.decided(won=True)
        if self._adopted >= entry.base:
            entry.change.adopted()
        question = _to_commit(self._states[entry.name])
        for receipt in await self._calls.ask(ranks, question, timeout_s):
            entry.change.committed(receipt)

    async def _prepare(self, change: Change, ranks: list[int], question: Question, timeout_s: float) -> None:
        asks = [asyncio.ensure_future(self._calls.ask_one(rank, question, timeout_s)) for rank in ranks]
        try:
            for receipt in asyncio.as_completed(asks):
                change.prepared(await receipt)
                if change.stage is not Stage.PREPARE:
                    return
        finally:
            for ask in asks:
                ask.cancel()

    def _version(self, name: str) -> int:
        state = self._states.get(name)
        return 0 if state is None else state.version

    # -- what is agreed

    def told(self, agreed: AgreedStates) -> None:
        """The supervisor's news."""
        if agreed.revision > self._revision:
            self._revision = agreed.revision
            self._states = {state.name: state for state in agreed.states}
            for engine in self._fleet.engines:
                engine.wanted = agreed.revision
                engine.asleep = self._sleeping
            self._confirm(agreed.revision)
            for task in self._settling.values():
                task.cancel()  # it is to reach what has been agreed since
            self._settling.clear()
        self._adopted = agreed.adopted
        for entry in self._open:
            self._judge(entry)
        for engine in self._fleet.engines:
            self._settle(engine.rank)

    def _judge(self, entry: _Open) -> None:
        """What the news say of a change."""
        state = self._states.get(entry.name)
        if state is not None and state.key == entry.key:
            entry.version = state.version
            entry.change.decided(won=True)
        elif self._version(entry.name) > entry.base:
            entry.change.decided(won=False)
        if entry.version and self._adopted >= entry.version:
            entry.change.adopted()
        entry.happened.set()

    # -- engines get there

    def _settle(self, rank: int) -> None:
        """Bring an engine to what is agreed, unless it is there or on its way."""
        engine = self._fleet.engines[rank]
        if engine.up and not engine.settled and rank not in self._settling:
            task = self._settling[rank] = asyncio.ensure_future(self._bring(engine))
            task.add_done_callback(lambda done: self._settled(rank, done))

    def _settled(self, rank: int, task: asyncio.Task[None]) -> None:
        if self._settling.get(rank) is task:
            del self._settling[rank]
            if not task.cancelled():
                self._settle(rank)  # it may have come back just now

    async def _bring(self, engine: EngineState) -> None:
        while engine.up and not engine.settled:
            revision, incarnation = engine.wanted, engine.incarnation
            receipts = [await self._commit(engine.rank, state) for state in list(self._states.values())]
            failed = [receipt for receipt in receipts if receipt.error is not None]
            for receipt in failed:
                log.warning("engine %d has not changed as agreed: %s", receipt.rank, receipt.error)
            if failed:
                await asyncio.sleep(RETRY_S)
            elif (
                engine.up
                and engine.incarnation == incarnation
                and {receipt.epoch for receipt in receipts} == {engine.epoch}
            ):
                engine.reached = revision
                self._fleet.on_takers()

    async def _commit(self, rank: int, state: AgreedState) -> Receipt:
        receipt = await self._calls.ask_one(rank, _to_commit(state), SETTLE_S)
        for entry in self._open:
            if entry.version == state.version:
                # whichever API server's call was the first
                entry.change.committed(msgspec.structs.replace(receipt, repeated=False))
                entry.happened.set()
        return receipt


def _to_commit(state: AgreedState) -> Question:
    return Question(state.name, state.arguments, state.key, CallPhase.COMMIT, state.version)
