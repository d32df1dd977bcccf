"""Finds the parts of a batch that cannot be computed, by running it in ever smaller batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from penstock.engine.schedule.batch import Batch

Result = TypeVar("Result")

MAX_RUNS = 256
"""Batches that a fault may cost. A fault of one stream among a thousand takes 20."""


def run_apart(batch: Batch, run: Callable[[Batch], Result]) -> Iterator[tuple[Batch, Result | Exception]]:
    """Run a batch that has failed in halves, those that fail in halves again.

    Yields each batch that ran with its result, and each part that fails by itself with its error; when
    MAX_RUNS do not suffice, also larger ones. A part is computed once: later batches run after the caller
    has settled earlier ones.
    """
    waiting, runs = _halves(batch), 0
    while waiting:
        part = waiting.pop()
        runs += 1
        try:
            result: Result | Exception = run(part)
        except Exception as error:  # noqa: BLE001 - the caller's to tell what it is
            if len(part) > 1 and runs < MAX_RUNS:
                waiting += _halves(part)
                continue
            result = error
        yield part, result


def _halves(batch: Batch) -> list[Batch]:
    """Up to two batches; one part by itself is tried again."""
    halves = np.array_split(np.arange(len(batch)), 2)
    return [batch.select(half) for half in reversed(halves) if len(half)]
