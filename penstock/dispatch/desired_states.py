"""The desired states, as an API server follows them: sends them to its engines, and takes what these observe.

The supervisor sets the states and sends them to every API server. An engine gets them on each connection and
whenever they change, from every API server. One that has not observed whether it sleeps, is paused, and with
which weights it computes gets no streams (:mod:`.stream_gates`), and one that has not observed an adapter
gets none of that adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from penstock.dispatch.adapter_registry import AdapterRegistry
from penstock.dispatch.connections import EngineState
from penstock.dispatch.stream_gates import StreamGates
from penstock.wire.adapter_list import ADAPTERS, AdapterStatus
from penstock.wire.control import MAX_ERROR_CHARS, ChangeRecord, DesiredStates, StateReport
from penstock.wire.messages import PAUSE, WEIGHTS, ApplyStates, DesiredState, StatesObserved, WireError
from penstock.wire.weights.desired import WeightsStatus


class EngineStates:
    """Keeps the engines' ``desired`` and ``observed`` states up to date."""

    def __init__(
        self,
        engines: Sequence[EngineState],
        adapters: AdapterRegistry,
        send: Callable[[EngineState, ApplyStates], None],
        *,
        lockstep: bool,
    ) -> None:
        """``send`` sends to an engine that is connected. ``lockstep``: no engine gets streams before all may
        get some."""
        self._engines = engines
        self._adapters = adapters
        self._send = send
        self._gates = StreamGates(engines, lockstep=lockstep)
        self._states: dict[str, DesiredState] = {}
        self._changes: dict[str, list[ChangeRecord]] = {}
        self._listener: Callable[[], None] = lambda: None

    def set_listener(self, listener: Callable[[], None]) -> None:
        """``listener`` is called when anything has changed."""
        self._listener = listener

    # -- what is desired

    def find(self, name: str) -> DesiredState:
        """The state; one that was never set has its default and the generation 0."""
        return self._states.get(name) or DesiredState(name, 0, {}, settled=True)

    def closed(self) -> str:
        """Why the engines are to take no streams: SLEEPING or PAUSED; empty: they may."""
        return self._gates.closed()

    def is_pause_desired(self) -> bool:
        """Whether the engines are to be paused, in any mode."""
        return bool(self.find(PAUSE).value.get("paused"))

    def changes(self, name: str) -> Sequence[ChangeRecord]:
        """The latest changes of the state, the latest last."""
        return self._changes.get(name, ())

    def reports(self) -> dict[str, StateReport]:
        """The states that all connected engines have observed, or that one could not apply, by name."""
        up = [engine for engine in self._engines if engine.up]
        reports = {}
        for name, state in self._states.items():
            failed = next((engine for engine in up if engine.has_failed(state)), None)
            if failed is not None and not state.is_firm:
                error = (failed.observed[name].error or "")[:MAX_ERROR_CHARS]
                reports[name] = StateReport(state.generation, error, failed.rank)
            elif all(engine.has_reached(state) for engine in up):
                reports[name] = StateReport(state.generation)
        return reports

    # -- events

    def desire(self, desired: DesiredStates) -> None:
        """The supervisor sent the states."""
        self._states = {state.name: state for state in desired.states}
        self._changes = desired.changes
        if ADAPTERS in self._states:
            self._adapters.desire(self._states[ADAPTERS])
        for state in desired.states:
            self._gates.desire(state)
        for engine in self._engines:
            engine.desired = desired.states
            if engine.up:
                self._send(engine, ApplyStates(desired.states))
        self._update()

    def on_connected(self, engine: EngineState) -> None:
        """An engine accepted a connection."""
        if engine.desired:
            self._send(engine, ApplyStates(list(engine.desired)))
        self._update()

    def on_disconnected(self) -> None:
        """The connection to an engine broke."""
        self._update()

    def on_observed(self, engine: EngineState, message: StatesObserved) -> None:
        """An engine tells what it has observed. Raises WireError."""
        for observed in message.states:
            if observed.name == ADAPTERS and observed.result:
                try:
                    status = msgspec.convert(observed.result, AdapterStatus)
                except msgspec.ValidationError as error:
                    raise WireError(f"its adapters are no list of them: {error}") from None
                engine.adapters, engine.missing_adapters = status.loaded, status.missing
                if observed.error is None:
                    self._adapters.on_observed(observed.generation, status.loaded)
            elif observed.name == WEIGHTS:
                try:
                    engine.weights_status = msgspec.convert(observed.result, WeightsStatus)
                except msgspec.ValidationError as error:
                    raise WireError(f"its weights are not described: {error}") from None
            engine.observed[observed.name] = observed
        self._update()

    def _update(self) -> None:
        self._gates.update()
        self._listener()
