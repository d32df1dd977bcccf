"""Two-phase commit of states that all engines share, such as sleep, in an API server: coordinates, retries.

The API server that gets the request is the coordinator, the engines are the participants, and the supervisor
decides: it keeps the agreed states and sends them to every API server. Each API server asks every engine to
commit decided changes, by calls with the same keys, so that an engine makes each change once. An engine that
has not confirmed whether it sleeps gets no streams, and one that has not confirmed an adapter gets none of
that adapter.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.dispatch.connections import EngineState
from penstock.dispatch.engine_client import EngineClient
from penstock.dispatch.engine_rpc import Receipt, RpcRequest
from penstock.dispatch.two_phase_change import Stage, TwoPhaseChange
from penstock.wire.adapter_list import ADAPTERS, AdapterStatus
from penstock.wire.control import AgreedState, AgreedStates, ProposeState
from penstock.wire.messages import RpcPhase

log = logging.getLogger(__name__)

SLEEP = "sleep"
"""Name of the state that :mod:`penstock.engine.loop.sleep` changes."""
ABORT_TIMEOUT_S = 2.0
"""How long an aborted change waits for an engine that does not answer ABORT."""
COMMIT_TIMEOUT_S = 30.0
"""Timeout of one COMMIT call; the next attempt follows."""
RETRY_S = 1.0
"""Delay between a failed commit and the next attempt."""


def _as_it_is(receipt: Receipt) -> Receipt:
    return receipt


@dataclass(slots=True, eq=False)
class _PendingChange:
    """A change that this API server coordinates."""

    change: TwoPhaseChange
    name: str
    key: str
    base: int
    """Version of the state before the change."""
    version: int = 0
    """Version of the state after the change; 0: not decided."""
    updated: asyncio.Event = field(default_factory=asyncio.Event)
    check: Callable[[Receipt], Receipt] = _as_it_is
    """Applied to the receipts of COMMIT."""


class TwoPhaseCommit:
    """``propose`` and ``confirm`` send to the supervisor, which answers by :meth:`on_agreed_states`."""

    def __init__(
        self,
        engine_client: EngineClient,
        propose: Callable[[ProposeState], None],
        confirm: Callable[[int], None],
    ) -> None:
        """``confirm`` is called with each revision that this API server applies."""
        self._engine_client = engine_client
        self._calls = engine_client.calls
        self._propose = propose
        self._confirm = confirm
        self._revision = self._confirmed = self._adopted = 0
        self._states: dict[str, AgreedState] = {}
        self._pending: list[_PendingChange] = []
        self._committing: dict[int, asyncio.Task[None]] = {}
        """Tasks that make an engine commit, by rank."""
        self._calls.set_connection_listener(self._on_connection)
        self.on_confirmed: Callable[[], None] = _ignore
        """Called when engines have confirmed the agreed states."""

    # -- coordinating a change

    async def change(
        self,
        name: str,
        arguments: dict[str, Any],
        key: str,
        timeout_s: float,
        check: Callable[[Receipt], Receipt] = _as_it_is,
    ) -> TwoPhaseChange:
        """Changes a state of all engines; returns the change once it has an outcome.

        Takes ``timeout_s`` at most to prepare, and as much again for the rest. ``check`` is applied to the
        receipts of engines that have committed, for what their results say.
        """
        ranks = self._engine_client.members()
        change = TwoPhaseChange(ranks)
        entry = _PendingChange(change, name, key, self._version(name), check=check)
        self._pending.append(entry)
        try:
            if self._is_agreed(name, key, arguments):
                await self._commit_again(entry, ranks, timeout_s)
            else:
                request = RpcRequest(name, arguments, key, RpcPhase.PREPARE)
                await self._prepare(change, ranks, request, timeout_s)
            if change.stage is Stage.DECIDE:
                self._propose(ProposeState(name=name, key=key, base=entry.base, arguments=arguments))
            async with asyncio.timeout(timeout_s):
                while change.stage is not Stage.DONE:
                    await entry.updated.wait()
                    entry.updated.clear()
        except TimeoutError:
            change.expired()
        finally:
            self._pending.remove(entry)
        if change.must_abort:
            await self._calls.ask(ranks, RpcRequest(name, arguments, key, RpcPhase.ABORT), ABORT_TIMEOUT_S)
        return change

    def _is_agreed(self, name: str, key: str, arguments: dict[str, Any]) -> bool:
        """Whether this was the latest change of the state."""
        state = self._states.get(name)
        return state is not None and (state.key, state.arguments) == (key, arguments)

    async def _commit_again(self, entry: _PendingChange, ranks: list[int], timeout_s: float) -> None:
        """Collects the receipts of a change that is decided already."""
        entry.change.decided(won=True)
        entry.version = entry.base
        if self._adopted >= entry.version:
            entry.change.adopted()
        request = _to_commit(self._states[entry.name])
        for receipt in await self._calls.ask(ranks, request, timeout_s):
            entry.change.committed(entry.check(receipt))

    async def _prepare(
        self, change: TwoPhaseChange, ranks: list[int], request: RpcRequest, timeout_s: float
    ) -> None:
        calls = [asyncio.ensure_future(self._calls.ask_one(rank, request, timeout_s)) for rank in ranks]
        try:
            for receipt in asyncio.as_completed(calls):
                change.prepared(await receipt)
                if change.stage is not Stage.PREPARE:
                    return
        finally:
            for call in calls:
                call.cancel()

    def _version(self, name: str) -> int:
        state = self._states.get(name)
        return 0 if state is None else state.version

    async def repeat(
        self, name: str, timeout_s: float, check: Callable[[Receipt], Receipt] = _as_it_is
    ) -> TwoPhaseChange:
        """Asks the engines for the receipts of the latest change of a state that has changed."""
        state = self._states[name]
        return await self.change(name, state.arguments, state.key, timeout_s, check)

    # -- agreed states

    def on_agreed_states(self, agreed: AgreedStates) -> None:
        """The supervisor sent the agreed states."""
        if agreed.revision > self._revision:
            self._revision = agreed.revision
            self._states = {state.name: state for state in agreed.states}
            self._engine_client.adapters.take(agreed)
            sleep = self._states.get(SLEEP)
            for engine in self._engine_client.engines:
                engine.target_revision = agreed.revision
                engine.least_revision = 0 if sleep is None else sleep.version
                engine.asleep = sleep is not None and sleep.arguments["level"] > 0
            for task in self._committing.values():
                task.cancel()  # started again below for the new revision
            self._committing.clear()
        self._adopted = agreed.adopted
        for entry in self._pending:
            self._update_change(entry)
        for engine in self._engine_client.engines:
            self._start_commit(engine.rank)
        self._confirm_if_reached()

    def _confirm_if_reached(self) -> None:
        """Confirms the agreed states once no connected engine lacks them: only then does this API server give
        its engines requests that depend on a change."""
        if self._confirmed < self._revision and all(
            engine.up_to_date for engine in self._engine_client.engines if engine.up
        ):
            self._confirmed = self._revision
            self._confirm(self._revision)
        self.on_confirmed()

    def _update_change(self, entry: _PendingChange) -> None:
        """Passes the agreed states on to a pending change."""
        state = self._states.get(entry.name)
        if state is not None and state.key == entry.key:
            entry.version = state.version
            entry.change.decided(won=True)
        elif self._version(entry.name) > entry.base:
            entry.change.decided(won=False)
        if entry.version and self._adopted >= entry.version:
            entry.change.adopted()
        entry.updated.set()

    # -- making engines commit

    def _on_connection(self, rank: int) -> None:
        """An engine connected or disconnected."""
        self._start_commit(rank)
        self._confirm_if_reached()

    def _start_commit(self, rank: int) -> None:
        """Starts to commit the agreed states on an engine, unless it has them or a commit is in progress."""
        engine = self._engine_client.engines[rank]
        if engine.up and not engine.up_to_date and rank not in self._committing:
            task = self._committing[rank] = asyncio.ensure_future(self._commit_until_done(engine))
            task.add_done_callback(lambda done: self._on_commit_done(rank, done))

    def _on_commit_done(self, rank: int, task: asyncio.Task[None]) -> None:
        if self._committing.get(rank) is task:
            del self._committing[rank]
            if not task.cancelled():
                self._start_commit(rank)  # the engine may have reconnected meanwhile

    async def _commit_until_done(self, engine: EngineState) -> None:
        while engine.up and not engine.up_to_date:
            revision, incarnation = engine.target_revision, engine.incarnation
            commits = (self._commit(engine, state) for state in list(self._states.values()))
            receipts = await asyncio.gather(*commits)
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
                engine.reached_revision = revision
                self._engine_client.on_engine_available()
                self._confirm_if_reached()

    async def _commit(self, engine: EngineState, state: AgreedState) -> Receipt:
        receipt = await self._calls.ask_one(engine.rank, _to_commit(state), COMMIT_TIMEOUT_S)
        if state.name == ADAPTERS and receipt.error is None and receipt.epoch == engine.epoch:
            status = msgspec.convert(receipt.result, AdapterStatus)
            engine.adapters, engine.missing_adapters = status.loaded, status.missing
            self._engine_client.adapters.on_confirmed(state.version, status.loaded)
        for entry in self._pending:
            # an engine with a later version of the state has made this change too
            if entry.name == state.name and 0 < entry.version <= state.version:
                # repeated only means that another API server's call was first
                entry.change.committed(entry.check(msgspec.structs.replace(receipt, repeated=False)))
                entry.updated.set()
        return receipt


def _ignore() -> None:
    """The ``on_confirmed`` of an API server that waits for nothing."""


def _to_commit(state: AgreedState) -> RpcRequest:
    return RpcRequest(
        method=state.name,
        arguments=state.arguments,
        key=state.key,
        phase=RpcPhase.COMMIT,
        version=state.version,
    )
