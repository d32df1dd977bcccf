"""The desired states of one engine: sleep, pause, adapters and weights; what they mean for its streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.engine.base import Engine, RequestRejected, StepRows
from penstock.engine.loop.pause import PauseState
from penstock.engine.loop.publisher import Publisher
from penstock.engine.loop.sleep import SleepState
from penstock.engine.loop.state_reconciler import StateApplier, StateReconciler
from penstock.engine.loop.stream_gate import StreamGate, wanted_ids
from penstock.engine.lora.adapter_state import AdapterState
from penstock.engine.weights.weights_state import WeightsState


class LoopStates:
    """Applies the states between steps."""

    def __init__(
        self,
        engine: Engine,
        publisher: Publisher,
        adapters: AdapterState | None,
        *,
        in_wave: Callable[[], bool],
        publish: Callable[[StepRows], None],
        beat: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """``adapters``: None: the engine runs none. ``in_wave``: whether another rank of its group may need
        steps of it. ``publish`` sends rows; ``beat`` tells the supervisor that the process lives."""
        gate = self.gate = StreamGate(engine, publisher.peers, in_wave)
        self._sleep = SleepState(
            engine,
            lambda code, message: publish(engine.fail_all(code, message)),
            gate.is_idle,
            gate.is_paused,
        )
        self._pause = PauseState(gate)
        self._adapters = adapters
        weights = self._weights = WeightsState(engine, gate, publish, publisher.on_weights, beat)
        appliers: list[StateApplier] = [self._sleep, self._pause]
        if adapters is not None:
            appliers.append(adapters)
        appliers.append(weights)  # last: nothing is published between its change and the report of it
        self.reconciler = StateReconciler(
            appliers, publisher.send, publisher.send_to_all, lambda: publisher.step, clock
        )
        self.operations: dict[str, Callable[[dict[str, Any]], Any]] = {
            "abort_streams": lambda arguments: gate.abort(wanted_ids(arguments)),
            "weights_checksum": lambda arguments: weights.checksum(),
        }
        """RPC methods about streams and states."""

    @property
    def sleep_level(self) -> int:
        """0: awake."""
        return self._sleep.level

    @property
    def is_reading(self) -> bool:
        """Whether files of adapters or weights are being read."""
        return self._weights.is_reading or (self._adapters is not None and self._adapters.is_reading)

    def refusal(self) -> RequestRejected | None:
        """Why new streams are refused; None: they are not."""
        return self._sleep.refusal() or self._pause.refusal()

    def advance(self) -> None:
        """Apply what is desired, as far as that is possible now."""
        self.reconciler.advance()
        if self._adapters is not None:
            self._adapters.tidy()
