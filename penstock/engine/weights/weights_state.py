"""The weights that an engine computes with, as a desired state: it replaces them between two steps.

To prepare a change is to open and check the files, and to hold the streams back: those that run are kept,
finish, or end, as the value says; new ones are queued. To commit it is to publish the rows that output
intervals hold back, and to copy the tensors. Rows from there on carry the change's generation. An engine that
dies meanwhile starts with the weights of its start, and is told the desired ones again.

Engines in lock-step hold first, all of them, and copy with the next value: no step has weights of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from penstock.engine.base import Engine, Hold, StepRows
from penstock.engine.loop.stream_gate import StreamGate
from penstock.engine.weights.weight_loader import WeightPlan
from penstock.wire.messages import WEIGHTS
from penstock.wire.weights import DesiredWeights, WeightsStatus

_HOLDS = {"keep": Hold.ALL, "abort": Hold.ALL, "wait": Hold.NEWCOMERS}


class WeightsState:
    """The weights of an engine, for :class:`penstock.engine.loop.state_reconciler.StateReconciler`."""

    name = WEIGHTS
    default: Mapping[str, Any] = {}

    def __init__(
        self,
        engine: Engine,
        gate: StreamGate,
        publish: Callable[[StepRows], None],
        on_change: Callable[[int], None],
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """``publish`` sends rows; those that follow ``on_change(generation)`` are of these weights. ``tick``
        is called while tensors are copied."""
        self._engine = engine
        self._gate = gate
        self._publish = publish
        self._on_change = on_change
        self._tick = tick
        self._value = DesiredWeights()
        self._generation = 0
        self._loaded = 0
        self._is_held = False
        """Whether the engine holds streams back until the next value."""
        self._next: DesiredWeights | None = None
        self._plan: WeightPlan | None = None
        self._unusable: ValueError | None = None
        """Why what the engine has already cannot be copied again."""

    def prepare(self, value: dict[str, Any]) -> None:
        """Open and check the files of ``value``, a :class:`DesiredWeights`, and hold streams back. Raises
        ValueError."""
        try:
            wanted = msgspec.convert(value, DesiredWeights)
        except msgspec.ValidationError as error:
            raise ValueError(f"weights: {error}") from None
        self._unusable = None
        self._plan = self._open(wanted)
        try:
            self._gate.hold(WEIGHTS, _HOLDS[wanted.streams])
        except ValueError:
            self._close()
            raise
        if wanted.streams == "abort":
            self._gate.abort()
        self._next = wanted

    def _open(self, wanted: DesiredWeights) -> WeightPlan | None:
        """None: there is nothing to copy."""
        if self._engine.weights is None:
            if wanted.sources:
                raise ValueError("this engine cannot replace its weights while it runs")
            return None
        if not wanted.sources and not self._value.sources:
            return None
        try:
            return self._engine.weights.plan(wanted.sources)
        except ValueError as error:
            if not self._has(wanted):
                raise
            self._unusable = error
            return None

    def _has(self, wanted: DesiredWeights) -> bool:
        """Whether the engine computes with these weights."""
        return wanted.version == self._value.version and wanted.sources == self._value.sources

    def prepared(self, *, firm: bool) -> bool:
        """Whether :meth:`commit` could run now. What the engine has already is copied again unless the value
        is ``firm``: then it was only to be kept, as when a change is rolled back. Raises ValueError."""
        assert self._next is not None  # it is being prepared
        if firm and self._has(self._next):
            self._close()
        elif self._unusable is not None:
            raise self._unusable
        if not self._gate.is_still() or (self._next.streams != "keep" and self._gate.has_running()):
            return False
        return not self._next.hold or not self._gate.in_wave()

    def commit(self, generation: int = 0) -> None:
        """Make the prepared change. Raises BrokenWeights, and what the loader raises: then the weights are as
        they were."""
        value = self._next
        assert value is not None  # it was prepared
        if value.hold:
            self._is_held = True
        else:
            try:
                self._replace(value)
            except Exception:
                self.abort()
                raise
            self._value, self._generation, self._is_held = value, generation, False
            self._on_change(generation)
        self.abort()  # nothing is prepared any more

    def _replace(self, value: DesiredWeights) -> None:
        loader = self._engine.weights
        if loader is None:
            return
        self._publish(self._engine.flush())
        if self._plan is not None:
            plan, self._plan = self._plan, None
            drop = value.cache == "drop"
            self._loaded = loader.load(plan, drop_cache=drop, in_step=self._is_held, tick=self._tick)

    def settle(self) -> None:
        """Nothing is kept of what was before."""

    def abort(self) -> None:
        """Undo :meth:`prepare`; streams that were ended are."""
        self._close()
        self._next = None
        self._gate.hold(WEIGHTS, Hold.ALL if self._is_held else Hold.NOTHING)

    def _close(self) -> None:
        if self._plan is not None:
            self._plan.close()
        self._plan = None

    def result(self) -> dict[str, Any]:
        """A :class:`WeightsStatus`."""
        status = WeightsStatus(self._value.version, self._generation, None, self._loaded)
        built: dict[str, Any] = msgspec.to_builtins(status)
        return built

    def checksum(self) -> str:
        """Of all parameters. Raises ValueError."""
        if self._engine.weights is None:
            raise ValueError("this engine cannot tell the checksum of its weights")
        return self._engine.weights.checksum()
