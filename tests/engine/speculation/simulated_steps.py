"""Streams whose steps take as long, and whose drafts are as good, as a test says."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.engine.batch.slots import SlotTable
from penstock.engine.sampling.metadata import SamplingMetadata
from penstock.engine.speculation.speculation import Speculation
from penstock.wire.arrays import I32
from penstock.wire.messages import SamplingParams, Submit

LIFE = 100
"""Steps after which the streams are followed by others."""
NOISE = 0.05


class SimulatedSteps:
    """Speculation with ``auto`` beside a model that is simulated."""

    def __init__(
        self,
        streams: int,
        acceptance: float,
        *,
        seed: int,
        fixed_ms: float = 4.0,
        token_ms: float = 0.05,
        drafts_ms: float = 0.5,
        slow: int = 0,
    ) -> None:
        """``slow``: the first steps with drafts that take 40 ms more, as when kernels are chosen."""
        self._random = np.random.default_rng(seed)
        self._acceptance = acceptance
        self._fixed_ms, self._token_ms, self._drafts_ms = fixed_ms, token_ms, drafts_ms
        self._slow = slow
        self._slots = np.arange(streams)
        table = SlotTable(streams, 64, ())
        for stream in range(streams):
            table.allocate(0, Submit(stream, np.arange(3, dtype="<i4").tobytes(), SamplingParams(50, 0)))
        self.speculation = Speculation(table, SamplingMetadata(table, 100), _LongDrafts(), None)
        self._steps = 0

    def run(self, steps: int) -> float:
        """Tokens per second, as a multiple of those without drafts."""
        speculation, slots = self.speculation, self._slots
        elapsed_ms, tokens = 0.0, 0
        for _ in range(steps):
            if self._steps % LIFE == 0:
                for slot in slots.tolist():
                    speculation.begin(slot)
            self._steps += 1
            speculation.plan(slots)
            drafted = np.zeros(len(slots), np.int32)
            if not speculation.is_idle and speculation.limit[slots].any():
                drafted = speculation.propose(slots, speculation.limit[slots])
            accepted = np.minimum(drafted, self._right(len(slots)))
            has_drafts = bool(drafted.any())
            computed = len(slots) + int(drafted.sum())
            step_ms = self._fixed_ms + self._token_ms * computed + self._drafts_ms * has_drafts
            step_ms *= 1 + NOISE * abs(self._random.standard_normal())
            if has_drafts:
                speculation.on_verified(slots, drafted, accepted)
                if self._slow:
                    self._slow -= 1
                    step_ms += 40
            generated = len(slots) + int(accepted.sum())
            speculation.observe(step_ms / 1000, computed, generated, drafts=has_drafts)
            elapsed_ms += step_ms
            tokens += generated
        plain = len(slots) / (self._fixed_ms + self._token_ms * len(slots))
        return tokens / elapsed_ms / plain

    def _right(self, streams: int) -> I32:
        """int32[streams]: how many tokens of a long draft would be accepted."""
        if not self._acceptance:
            return np.zeros(streams, np.int32)
        return (self._random.geometric(1 - self._acceptance, streams) - 1).astype(np.int32)


class _LongDrafts:
    """A proposer that always finds as many tokens as it may."""

    def begin(self, slot: int, scope: int = 0) -> None: ...

    def restart(self, slot: int) -> None: ...

    def reset(self) -> None: ...

    def end(self, slot: int) -> None: ...

    def propose(self, slots: NDArray[np.intp], most: I32) -> I32:
        return most.copy()
