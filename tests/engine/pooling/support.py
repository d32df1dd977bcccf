"""Requests for vectors, and engines that make synthetic ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.config.serve import ServeConfig
from penstock.engine.base import StepRows
from penstock.engine.pooling.engine import PoolingEngine
from penstock.engine.pooling.model import PoolingBatch, PoolingModel
from penstock.engine.synthetic.pooling import SyntheticPooling
from penstock.wire.arrays import F32
from penstock.wire.messages import EngineInfo, SamplingParams, Submit
from penstock.wire.pooling import PoolingParams, PoolingTask

WIDTH = 8


def pooling_submit(
    stream: int,
    lengths: Sequence[int],
    task: PoolingTask = PoolingTask.EMBED,
    *,
    first_id: int = 1,
    dimensions: int = 0,
    priority: int = 0,
) -> Submit:
    """Inputs of these lengths, whose ids count up from ``first_id``."""
    ids = np.arange(first_id, first_id + sum(lengths), dtype="<i4")
    params = PoolingParams(task=task, lengths=np.array(lengths, "<i4").tobytes(), dimensions=dimensions)
    sampling = SamplingParams(max_tokens=len(lengths), seed=0)
    return Submit(stream, ids.tobytes(), sampling, priority=priority, pooling=params)


def make_engine(model: PoolingModel | None = None, **options: object) -> PoolingEngine:
    model = model or SyntheticPooling(WIDTH, 2)
    config = ServeConfig(**options)  # type: ignore[arg-type]  # options of the test
    info = EngineInfo("synthetic", 512, 10_000, config.max_num_seqs, pooling=model.info)
    return PoolingEngine(config, model, info)


class PickyModel(SyntheticPooling):
    """Cannot compute inputs with a certain token, and remembers the size of each batch."""

    def __init__(self, bad: int = -1) -> None:
        super().__init__(WIDTH, 2)
        self.bad = bad
        self.broken = False
        self.batches: list[list[int]] = []

    def compute(self, batch: PoolingBatch) -> Sequence[F32]:
        self.batches.append(batch.lengths.tolist())
        if self.broken:
            raise ValueError("it is broken")
        if (batch.ids == self.bad).any():
            raise ValueError("this token is bad")
        return super().compute(batch)


def run(engine: PoolingEngine) -> list[StepRows]:
    """Steps until all is done."""
    steps = []
    while engine.has_work():
        steps.append(engine.step())
        assert len(steps) < 1000
    return steps


def vectors_of(steps: Sequence[StepRows], stream: int) -> F32:
    """All vectors of a stream, float32[N, W]."""
    parts: list[F32] = []
    for rows in steps:
        if rows.vectors is None:
            continue
        assert rows.count is not None
        sizes = rows.vectors.sizes(rows.tokens, rows.count)
        ends = np.cumsum(sizes)
        for row in np.flatnonzero(rows.stream == stream).tolist():
            values = rows.vectors.values[ends[row] - sizes[row] : ends[row]]
            parts.append(values.reshape(-1, int(rows.vectors.width[row])))
    return np.concatenate(parts)
