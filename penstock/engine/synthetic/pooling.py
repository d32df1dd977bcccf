"""Synthetic vectors: no model. A vector is a function of its input's token ids alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.engine.pooling.model import PoolingBatch
from penstock.engine.sampling.rng import GAMMA, mix
from penstock.engine.synthetic.faults import Faults
from penstock.wire.arrays import F32, I32
from penstock.wire.pooling import PER_TOKEN, PoolingInfo, PoolingParams, PoolingTask

_OF_LABELS = (PoolingTask.CLASSIFY, PoolingTask.TOKEN_CLASSIFY)


class SyntheticPooling:
    """Each step takes ``step_s``. All tasks are offered."""

    device, dtype = "cpu", ""

    def __init__(
        self,
        width: int,
        labels: int,
        *,
        step_s: float = 0.0,
        faults: Faults | None = None,
        generates: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``width``: values of a vector; ``labels``: of the classifier."""
        self.info = PoolingInfo(tuple(map(int, PoolingTask)), width, labels, generates)
        self._step_s = step_s
        self._faults = faults
        self._sleep = sleep
        self._steps = np.arange(1, 1 + max(width, labels), dtype=np.uint64) * GAMMA

    def compute(self, batch: PoolingBatch) -> Sequence[F32]:
        began = time.monotonic()
        if self._faults is not None:
            self._faults.inject()
        made = []
        first = start = 0
        for group in batch.groups:
            lengths = batch.lengths[first : first + group.inputs]
            end = start + int(lengths.sum())
            made.append(self._of_group(group.params, batch.ids[start:end], lengths))
            first, start = first + group.inputs, end
        rest = began + self._step_s - time.monotonic()
        if rest > 0:
            self._sleep(rest)
        return made

    def _of_group(self, params: PoolingParams, ids: I32, lengths: I32) -> F32:
        tokens = mix(ids.astype(np.uint64) + GAMMA)
        if params.task in PER_TOKEN:
            seeds = tokens
        else:  # the order of the tokens counts
            ends = np.cumsum(lengths)
            within = np.arange(len(ids)) - np.repeat(ends - lengths, lengths)
            seeds = np.add.reduceat(tokens * (2 * within + 1).astype(np.uint64), ends - lengths)
        width = self.info.labels if params.task in _OF_LABELS else params.dimensions or self.info.width
        values = self._draw(seeds, width)
        if params.task in _OF_LABELS:
            return _activated(values) if params.activate else values
        if params.normalize:
            norms: F32 = np.sqrt(np.einsum("nd,nd->n", values, values))
            values /= np.maximum(norms, np.float32(1e-12))[:, None]
        return values

    def _draw(self, seeds: NDArray[np.uint64], width: int) -> F32:
        """float32[N, width] in [-1, 1)."""
        bits = seeds[:, None] + self._steps[None, :width]
        bits ^= bits >> np.uint64(31)
        bits *= np.uint64(0x94D049BB133111EB)
        drawn: F32 = (bits >> np.uint64(40)).astype(np.float32)
        np.multiply(drawn, np.float32(2.0**-23), out=drawn)
        np.subtract(drawn, np.float32(1), out=drawn)
        return drawn


def _activated(logits: F32) -> F32:
    if logits.shape[1] == 1:
        one: F32 = np.reciprocal(np.exp(-logits) + np.float32(1))
        return one
    grown = np.exp(logits - logits.max(axis=1, keepdims=True))
    several: F32 = grown / grown.sum(axis=1, keepdims=True)
    return several
