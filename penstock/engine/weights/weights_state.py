"""The weights that an engine computes with, as a desired state: it replaces them between two steps.

To prepare a change is to open and check the files, in a thread, and then to hold the streams back: those that
run are kept, finish, or end, as the value says; new ones are queued. To commit it is to publish the rows that
output intervals hold back, and to copy the tensors. Rows from there on carry the change's generation. An
engine that dies meanwhile starts with the weights of its start, and is told the desired ones again.

Engines in lock-step hold first, all of them, and copy with the next value: no step has weights of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Any

import msgspec

from penstock.engine.base import Engine, Hold, StepRows
from penstock.engine.loop.stream_gate import StreamGate
from penstock.engine.weights.weight_loader import WeightPlan
from penstock.wire.messages import WEIGHTS
from penstock.wire.weights.desired import DesiredWeights, WeightsStatus

OPENING_S = 0.005
"""Seconds that steps wait for files to be opened and checked, so that little models have no second wait for
them. Those of a model with thousands of tensors take a second the first time."""
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
        self._executor: Executor | None = None
        """Opens files: a thread, from the first change on."""
        self._opening: Future[WeightPlan] | None = None
        """Files that are being opened, or were; None: there are none to copy."""
        self._is_holding = False
        """Whether streams are held back for the next value."""

    @property
    def is_reading(self) -> bool:
        """Whether files are being opened."""
        return self._opening is not None and not self._opening.done()

    def prepare(self, value: dict[str, Any]) -> None:
        """Begin to open and check the files of ``value``, a :class:`DesiredWeights`. Raises ValueError."""
        try:
            wanted = msgspec.convert(value, DesiredWeights)
        except msgspec.ValidationError as error:
            raise ValueError(f"weights: {error}") from None
        loader = self._engine.weights
        if loader is None and wanted.sources:
            raise ValueError("this engine cannot replace its weights while it runs")
        self._next = wanted
        if loader is not None and (wanted.sources or self._value.sources):
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, "weights")
            self._opening = self._executor.submit(loader.plan, wanted.sources)
            wait([self._opening], OPENING_S)

    def _has(self, wanted: DesiredWeights) -> bool:
        """Whether the engine computes with these weights."""
        return wanted.version == self._value.version and wanted.sources == self._value.sources

    def prepared(self, *, firm: bool) -> bool:
        """Whether :meth:`commit` could run now. What the engine has already is copied again unless the value
        is ``firm``: then it was only to be kept, as when a change is rolled back. Raises ValueError."""
        wanted = self._next
        assert wanted is not None  # it is being prepared
        if firm and self._has(wanted):
            self._close()
        if self.is_reading:
            return False
        if self._opening is not None:
            self._opening.result()
        if not self._is_holding:
            self._gate.hold(WEIGHTS, _HOLDS[wanted.streams])
            self._is_holding = True
            if wanted.streams == "abort":
                self._gate.abort()
        waits = wanted.streams == "wait" and self._gate.has_running()
        if waits and not firm and self._gate.is_paused():
            raise ValueError(
                "streams is 'wait', but a pause keeps the streams that run: resume first, or update with "
                "'keep' or 'abort'"
            )
        if not self._gate.is_still() or (wanted.streams != "keep" and self._gate.has_running()):
            return False
        return not wanted.hold or not self._gate.in_wave()

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
        if self._opening is not None:
            plan, self._opening = self._opening.result(), None
            drop = value.cache == "drop"
            self._loaded = loader.load(plan, drop_cache=drop, in_step=self._is_held, tick=self._tick)

    def settle(self) -> None:
        """Nothing is kept of what was before."""

    def abort(self) -> None:
        """Undo :meth:`prepare`; streams that were ended are."""
        self._close()
        self._next = None
        self._is_holding = False
        self._gate.hold(WEIGHTS, Hold.ALL if self._is_held else Hold.NOTHING)

    def _close(self) -> None:
        """Open no files, or close them."""
        opening, self._opening = self._opening, None
        if opening is not None and not opening.cancel():
            opening.add_done_callback(_close_plan)

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


def _close_plan(opening: Future[WeightPlan]) -> None:
    if opening.exception() is None:
        opening.result().close()
