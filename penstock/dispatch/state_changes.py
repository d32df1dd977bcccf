"""Changes of desired states, such as sleep, in an API server: asks for them and waits until they hold.

    asked ──the supervisor has set it──► pending ──everybody has observed it──► settled: DONE or PARTIAL
      │                                     │
      │ another change was first            │ an engine cannot apply it, or the time is over
      ▼                                     ▼
   CONFLICT                         rolled back: ABORTED

The supervisor decides: it sets the value, and the one before again if a member reports that it has not got
there. This API server reports for itself and its engines, also about changes that others asked for.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.dispatch.connections import EngineState
from penstock.dispatch.engine_client import EngineClient
from penstock.dispatch.engine_rpc import OperationOutcome, OperationResult, Receipt
from penstock.wire.control import (
    MAX_ASKED_CHARS,
    MAX_CALL_CHARS,
    MAX_STATE_BYTES,
    ChangeRecord,
    ChangeState,
    ChildReport,
    DesiredStates,
    StateReport,
    StatesReport,
)
from penstock.wire.messages import CONFLICT

ENVELOPE_BYTES = 4096
"""Bytes of a change beside its values."""
ROLLBACK_TIMEOUT_S = 2.0
"""How long a change waits for its rollback, and then until that is observed."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that waits for a change."""

    name: str
    key: str
    asked: str
    base: int
    """The change has a later generation."""
    call: str
    """Of the change, if this request makes it; otherwise an earlier request did, or another one at the same
    time. Empty: this one has not asked for it."""
    engines: list[EngineState]
    late: dict[int, str] = field(default_factory=dict)
    """What was the matter with engines that had not observed the change in time, by rank."""

    def owns(self, record: ChangeRecord) -> bool:
        """Whether this request makes the change."""
        return bool(self.call) and record.call == self.call


class StateChanges:
    """The changes that one API server asks for, and its reports about those of all."""

    def __init__(
        self,
        engine_client: EngineClient,
        send: Callable[[ChildReport], None],
        on_update: Callable[[], None] = lambda: None,
    ) -> None:
        """``send`` sends to the supervisor, which answers by :meth:`on_desired_states`. ``on_update`` is
        called when engines may have observed something."""
        self._engine_client = engine_client
        self._states = engine_client.states
        self._send = send
        self._on_update = on_update
        self._updated = asyncio.Event()
        self._reports: dict[str, StateReport] = {}
        """What the supervisor was told last, by name."""
        self._states.set_listener(self._on_change)

    async def change(
        self,
        name: str,
        key: str,
        asked: str,
        stages: list[dict[str, Any]],
        timeout_s: float,
        initial: Sequence[dict[str, Any]] = (),
    ) -> OperationResult:
        """Set a state; returns when all engines and API servers have observed it, or it is rolled back.

        ``key``: idempotency key; ``asked`` says in words what it stands for. ``stages``: values, the final
        one last; everybody must have observed one before the next is set. ``initial``: such values for what
        there is before the first change, if the default alone will not do. Takes ``timeout_s`` at most, and
        twice ROLLBACK_TIMEOUT_S for a rollback.
        """
        asked, state = asked[:MAX_ASKED_CHARS], self._states.find(name)
        known = self.find_change(name, key)
        if known is None or known.error:
            waiting = self._waiting(
                name, key, asked, state.generation, secrets.token_hex(MAX_CALL_CHARS // 2)
            )
            if not state.is_firm:
                return self._ended(waiting, OperationOutcome.CONFLICT)
            change = ChangeState(
                name=name,
                key=key,
                asked=asked,
                base=state.generation,
                stages=stages,
                initial=list(initial),
                call=waiting.call,
            )
            self._send(change)
            return await self._follow(waiting, timeout_s)
        return await self._follow(self._waiting(name, key, asked, 0), timeout_s)

    async def join(self, name: str, timeout_s: float) -> OperationResult | None:
        """Wait for the latest change of a state, which others asked for; None if there was none."""
        made = [record for record in self._states.changes(name) if not record.error]
        if not made:
            return None
        return await self._follow(self._waiting(name, made[-1].key, made[-1].asked, 0), timeout_s)

    def find_change(self, name: str, key: str, base: int = 0) -> ChangeRecord | None:
        """What is known of the change with a key, if it has a later generation than ``base``."""
        for record in self._states.changes(name):
            if record.key == key and record.generation > base:
                return record
        return None

    # -- waiting

    def _waiting(self, name: str, key: str, asked: str, base: int, call: str = "") -> _Waiting:
        engines = [self._engine_client.engines[rank] for rank in self._engine_client.members()]
        return _Waiting(name, key, asked, base, call, engines)

    async def _follow(self, waiting: _Waiting, timeout_s: float) -> OperationResult:
        name = waiting.name
        if not await self._until(lambda: self._outcome(waiting) is not None, timeout_s):
            self._expire(waiting, timeout_s)
            if not self._holds(waiting):
                await self._until(lambda: self._has_given_up(waiting, timeout_s), ROLLBACK_TIMEOUT_S)
        outcome = self._outcome(waiting)
        if outcome is None:
            outcome = OperationOutcome.PARTIAL if self._holds(waiting) else OperationOutcome.UNDECIDED
        if outcome is OperationOutcome.ABORTED:
            await self._until(lambda: self._states.find(name).settled, ROLLBACK_TIMEOUT_S)
        return self._ended(waiting, outcome)

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await self._updated.wait()
        except TimeoutError:
            return condition()
        return True

    def _outcome(self, waiting: _Waiting) -> OperationOutcome | None:
        record = self.find_change(waiting.name, waiting.key, waiting.base)
        if record is None:
            others = self._states.find(waiting.name).generation > waiting.base
            return OperationOutcome.CONFLICT if others else None
        if record.asked != waiting.asked:
            return OperationOutcome.CONFLICT
        if record.error:
            return OperationOutcome.ABORTED
        reached = all(_has_reached(engine, waiting.name, record) for engine in waiting.engines)
        if not waiting.owns(record):  # a later change may be pending, or be rolled back
            state = self._states.find(waiting.name)
            reached = state.settled and all(engine.has_reached(state) for engine in waiting.engines)
        return OperationOutcome.DONE if record.settled and reached else None

    def _has_given_up(self, waiting: _Waiting, timeout_s: float) -> bool:
        """Whether the change has ended; gives up what has been set meanwhile."""
        if self._outcome(waiting) is not None:
            return True
        self._expire(waiting, timeout_s)
        return False

    def _holds(self, waiting: _Waiting) -> bool:
        """Whether the change is settled; or pending, for a request that may not give it up."""
        record = self.find_change(waiting.name, waiting.key, waiting.base)
        return record is not None and (record.settled or not waiting.owns(record))

    def _expire(self, waiting: _Waiting, timeout_s: float) -> None:
        """The time is over: note who is late, and give up what this request has asked for."""
        generation = self._states.find(waiting.name).generation
        for engine in waiting.engines:
            if engine.observed_generation(waiting.name) < generation:
                what = "no answer" if engine.up else "not connected"
                waiting.late.setdefault(engine.rank, f"{what} within {timeout_s:g} s")
        record = self.find_change(waiting.name, waiting.key, waiting.base)
        if record is not None and waiting.owns(record) and not record.settled and not record.error:
            error = f"not everybody made it within {timeout_s:g} s"
            self._report({waiting.name: StateReport(generation, error)})

    # -- the end

    def _ended(self, waiting: _Waiting, outcome: OperationOutcome) -> OperationResult:
        record = self.find_change(waiting.name, waiting.key, waiting.base)
        if record is not None and record.asked != waiting.asked:
            reason = f"Idempotency-Key {waiting.key!r} was used for: {record.asked}, not for: {waiting.asked}"
            return OperationResult(outcome, [], reason)
        receipts = []
        for engine in waiting.engines:
            error, code = self._error(waiting, outcome, record, engine)
            epoch, observed = engine.epoch if engine.up else None, engine.observed.get(waiting.name)
            if error is not None or observed is None:
                receipts.append(Receipt(engine.rank, epoch, error=error, code=code))
            else:
                repeated, result = record is None or not waiting.owns(record), observed.result
                receipts.append(Receipt(engine.rank, epoch, observed.step, repeated, result=result))
        return OperationResult(outcome, receipts)

    def _error(
        self, waiting: _Waiting, outcome: OperationOutcome, record: ChangeRecord | None, engine: EngineState
    ) -> tuple[str | None, str]:
        """Why an engine has not made the change, and its code."""
        late = waiting.late.get(engine.rank)
        if outcome is OperationOutcome.CONFLICT:
            return f"another change of {waiting.name} is under way or came first", CONFLICT
        if outcome is OperationOutcome.UNDECIDED or record is None:
            return "it is not known whether the change holds", "undecided"
        if outcome is OperationOutcome.ABORTED:
            if record.rank == engine.rank:
                return record.error, ""
            if late is not None:
                return late, "timeout"
            why = StateReport(0, record.error, record.rank).reason
            return f"the change was rolled back: {why}", "aborted"
        if _has_reached(engine, waiting.name, record):
            return None, ""
        return late or "it has not made the change in time", "timeout"

    # -- what is desired, and what is observed

    def on_desired_states(self, desired: DesiredStates) -> None:
        """The supervisor sent the desired states."""
        self._states.desire(desired)

    def _on_change(self) -> None:
        """The desired states, or what the engines have observed, have changed."""
        self._report(self._states.reports())
        self._updated.set()
        self._updated = asyncio.Event()
        self._on_update()

    def _report(self, reports: dict[str, StateReport]) -> None:
        """Tell the supervisor what is news."""
        merged = self._reports | reports
        if merged != self._reports:
            self._reports = merged
            self._send(StatesReport(states=merged))


def fits(*stages: dict[str, Any]) -> bool:
    """Whether a change with these values can be sent to the supervisor."""
    return len(msgspec.json.encode(stages)) <= MAX_STATE_BYTES - ENVELOPE_BYTES


def _has_reached(engine: EngineState, name: str, record: ChangeRecord) -> bool:
    return engine.observed_generation(name) >= record.generation
