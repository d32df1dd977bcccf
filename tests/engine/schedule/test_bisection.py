"""Parts of a batch that has failed, without an engine."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.engine.schedule.batch import Batch
from penstock.engine.schedule.bisection import MAX_RUNS, run_apart


def make_batch(parts: int, drafts: list[int] | None = None, sampled: int | None = None) -> Batch:
    samples = np.arange(parts if sampled is None else sampled)
    return Batch(
        slots=np.arange(parts),
        start=np.zeros(parts, np.int32),
        count=np.full(parts, 5, np.int32),
        singles=0,
        decodes=0 if drafts is None else np.count_nonzero(drafts),
        samples=samples,
        generations=np.zeros(len(samples), np.int64),
        drafts=None if drafts is None else np.array(drafts, np.int32),
    )


def test_parts_without_drafts_have_none() -> None:
    batch = make_batch(4, drafts=[4, 4, 0], sampled=3)
    for parts, drafts in (([0, 2], [4, 0]), ([2], None), ([3], None), ([1, 3], [4])):
        part = batch.select(np.array(parts))
        assert (None if part.drafts is None else part.drafts.tolist()) == drafts
        assert len(part.samples) == sum(index < 3 for index in parts)


@pytest.mark.parametrize("bad", [{0}, {6}, {1, 5, 7}, set(range(8))])
def test_parts_that_fail_are_found_and_others_run_once(bad: set[int]) -> None:
    runs: list[list[int]] = []

    def run(part: Batch) -> int:
        runs.append(part.slots.tolist())
        if bad & {*runs[-1]}:
            raise MemoryError
        return len(part)

    failed, ran = [], []
    for part, result in run_apart(make_batch(8), run):
        (failed if isinstance(result, MemoryError) else ran).extend(part.slots.tolist())
    assert failed == sorted(bad)
    assert ran == sorted({*range(8)} - bad)


def test_runs_are_bounded_and_every_part_has_an_end() -> None:
    runs = 0

    def run(part: Batch) -> None:
        nonlocal runs
        runs += 1
        raise MemoryError

    parts = list(run_apart(make_batch(1000), run))
    assert MAX_RUNS <= runs < MAX_RUNS + 20
    assert sorted(np.concatenate([part.slots for part, _ in parts]).tolist()) == [*range(1000)]
    assert all(isinstance(result, MemoryError) for _, result in parts)
