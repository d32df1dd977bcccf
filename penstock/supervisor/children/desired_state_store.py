"""The desired states of the fleet, such as sleep, kept by the supervisor because API servers come and go.

    settled ──change──► pending ──all API servers and engines have observed it──► settled
                           │
                           │ a member cannot apply it, it took too long, or who asked for it has ended
                           ▼
                   pending, back to the settled value ──observed──► settled

Each step is a further generation of the state. Members apply the latest generation that they know, so whoever
misses one, or comes later, converges all the same. A change may have several stages, values of which
everybody must have observed one before the next is set. A rollback is not rolled back: members apply it as
far as they can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.supervisor.children.actions import ProcessName
from penstock.wire.control import (
    MAX_CHANGES,
    MAX_STATES,
    ChangeRecord,
    ChangeState,
    DesiredStates,
    StateReport,
)
from penstock.wire.messages import DesiredState


@dataclass(slots=True, eq=False)
class _Held:
    """One state."""

    state: DesiredState
    stages: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    """The values that are set one after the other; ``state`` has one of them."""
    ahead: list[dict[str, Any]] = field(default_factory=list)
    """Values that follow the present one."""
    settled: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    """The stages of the value that was settled last; a rollback goes through them again."""
    owner: ProcessName | None = None
    """The API server that asked for the pending change; None: none is pending."""
    changes: list[ChangeRecord] = field(default_factory=list)


class DesiredStateStore:
    """Sets, settles and rolls back. At most one change of each state is pending."""

    def __init__(self, start: Mapping[str, dict[str, Any]] | None = None, key: str = "") -> None:
        """``start``: values that all processes start with, by name; ``key``: of the change that they count
        as."""
        self._held: dict[str, _Held] = {}
        self._reports: dict[ProcessName, dict[str, StateReport]] = {}
        """What each API server and its engines have reached, by name."""
        for name, value in (start or {}).items():
            state = DesiredState(name, 1, value, settled=True)
            record = ChangeRecord(key, "start", 1, settled=True)
            self._held[name] = _Held(state, settled=[value], changes=[record])

    def table(self) -> DesiredStates:
        """The message that API servers get."""
        return DesiredStates(
            states=[held.state for held in self._held.values()],
            changes={name: list(held.changes) for name, held in self._held.items()},
        )

    def settled(self) -> DesiredStates | None:
        """What a process starts with; it gets what is pending as everybody does. None: nothing."""
        states = [held.state for held in self._held.values() if held.state.settled and held.state.generation]
        return DesiredStates(states=states, changes={}) if states else None

    # -- events

    def change(self, server: ProcessName, change: ChangeState) -> bool:
        """Set a state, and return True; False: it has another generation than the change is based on, another
        change is pending, this one was made already, or there are MAX_STATES others."""
        held = self._held.get(change.name)
        if held is None:
            if change.base or len(self._held) >= MAX_STATES:
                return False
            start = DesiredState(change.name, 0, {}, settled=True)
            held = self._held[change.name] = _Held(start, settled=change.initial or [{}])
        known = next((record for record in held.changes if record.key == change.key), None)
        if held.state.generation != change.base or not held.state.is_firm or (known and not known.error):
            return False
        self._set(held, change.stages)
        held.owner = server
        kept = [record for record in held.changes if record is not known]
        kept.append(ChangeRecord(change.key, change.asked, held.state.generation, call=change.call))
        held.changes = kept[-MAX_CHANGES:]
        return True

    def report(self, server: ProcessName, states: Mapping[str, StateReport]) -> None:
        """An API server tells what it and its engines have reached."""
        self._reports[server] = dict(states)

    def forget(self, server: ProcessName) -> None:
        """An API server has exited."""
        self._reports.pop(server, None)

    def advance(self, servers: Sequence[ProcessName]) -> tuple[bool, list[str]]:
        """Settle what all ``servers``, those that serve, have reached, or set its next stage; roll back what
        one of them cannot reach. Returns whether anything changed, and what was rolled back, in words."""
        changed, failures = False, []
        for held in self._held.values():
            failure = None if held.state.is_firm else self._failure(held, servers)
            if failure is not None:
                self._roll_back(held, failure)
                failures.append(f"{held.state.name} is set back: {failure.reason}")
                changed = True
            elif not held.state.settled and self._is_reached(held.state, servers):
                self._advance(held)
                changed = True
        return changed, failures

    def _failure(self, held: _Held, servers: Sequence[ProcessName]) -> StateReport | None:
        """Why a pending state is to be rolled back."""
        if held.owner not in servers:
            return StateReport(held.state.generation, "the API server that was asked has ended")
        reports = (self._reported(server, held.state) for server in servers)
        return next((report for report in reports if report is not None and report.error), None)

    def _is_reached(self, state: DesiredState, servers: Sequence[ProcessName]) -> bool:
        reports = [self._reported(server, state) for server in servers]
        return bool(reports) and all(report is not None and not report.error for report in reports)

    def _reported(self, server: ProcessName, state: DesiredState) -> StateReport | None:
        """What an API server has reported about this generation of a state."""
        report = self._reports.get(server, {}).get(state.name)
        return report if report is not None and report.generation == state.generation else None

    # -- generations

    def _set(self, held: _Held, stages: list[dict[str, Any]], *, rollback: bool = False) -> None:
        held.stages, held.ahead = stages, stages[1:]
        held.state = DesiredState(held.state.name, held.state.generation + 1, stages[0], rollback)

    def _roll_back(self, held: _Held, failure: StateReport) -> None:
        held.changes[-1] = msgspec.structs.replace(held.changes[-1], error=failure.error, rank=failure.rank)
        held.owner = None
        self._set(held, held.settled, rollback=True)

    def _advance(self, held: _Held) -> None:
        """Everybody has observed the generation: the next stage follows, or it is settled."""
        state = held.state
        if held.ahead:
            value = held.ahead.pop(0)
            held.state = DesiredState(state.name, state.generation + 1, value, state.rollback)
        else:
            held.state = msgspec.structs.replace(state, settled=True)
            held.settled, held.owner = held.stages, None
        if not state.rollback:
            held.changes[-1] = msgspec.structs.replace(
                held.changes[-1], generation=held.state.generation, settled=held.state.settled
            )
