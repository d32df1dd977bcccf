"""Which desired states keep streams from an engine: one that is to take none, or has not observed the state.

An engine that restarts gets no streams before it sleeps, is paused and has the weights as all others. A
change that engines make while they take streams, such as that of weights, keeps none from an engine before it
holds: until then some have made it and others have not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.dispatch.connections import EngineState
from penstock.wire.messages import PAUSE, PAUSED, SLEEP, SLEEPING, WEIGHTS, DesiredState

KEEP = "keep"
"""Mode in which engines that are paused queue streams."""


@dataclass(slots=True)
class _Gate:
    code: str
    """Why an engine gets no streams."""
    closed: bool = False
    """The state is that engines take none."""
    generation: int = 0
    """What an engine must have observed."""


class StreamGates:
    """The gates of all engines of one API server."""

    def __init__(self, engines: Sequence[EngineState], *, lockstep: bool) -> None:
        """``lockstep``: no engine gets streams before all may get some."""
        self._engines = engines
        self._lockstep = lockstep
        self._gates = {SLEEP: _Gate(SLEEPING), PAUSE: _Gate(PAUSED), WEIGHTS: _Gate(WEIGHTS)}

    def desire(self, state: DesiredState) -> None:
        """A state was set, or holds."""
        gate = self._gates.get(state.name)
        if gate is not None:
            gate.closed = _takes_none(state)
            if state.is_firm or not _takes_streams_meanwhile(state):
                gate.generation = state.generation

    def closed(self) -> str:
        """Why all engines are to take no streams: SLEEPING or PAUSED; empty: they may."""
        return next((gate.code for gate in self._gates.values() if gate.closed), "")

    def update(self) -> None:
        """Engines may have observed something."""
        for engine in self._engines:
            engine.closed = self.closed() or self._awaited(engine)

    def _awaited(self, engine: EngineState) -> str:
        """Why an engine that is there gets no streams yet."""
        if not engine.up:
            return ""
        members = self._engines if self._lockstep else (engine,)
        for name, gate in self._gates.items():
            if any(member.observed_generation(name) < gate.generation for member in members):
                return gate.code
        return ""


def _takes_none(state: DesiredState) -> bool:
    """Whether engines take no streams once they have observed it."""
    value = state.value
    return bool(value.get("level") or (value.get("paused") and value.get("mode") != KEEP))


def _takes_streams_meanwhile(state: DesiredState) -> bool:
    """Whether engines take streams while they make the change."""
    return state.name == WEIGHTS or (bool(state.value.get("paused")) and not _takes_none(state))
