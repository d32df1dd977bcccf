"""Histograms that observe whole columns: they keep them, and count what many steps gave at once."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEPT_COLUMNS = 64
"""Columns of :meth:`Histogram.observe` that are kept at most. Counting one of 64 values takes 6 microseconds,
counting 64 of them together takes 60."""

KEPT_VALUES = 256
"""Values of :meth:`Histogram.add` that are kept at most."""


def rebucketed(
    counts: NDArray[np.int64], bounds: Sequence[float], wanted: Sequence[float]
) -> tuple[int, ...]:
    """``counts``, int64[B + 1] of ``bounds``, in the buckets of ``wanted``, which are among ``bounds``."""
    starts = [0, *(bisect_right(bounds, bound) for bound in wanted)]
    return tuple(np.add.reduceat(counts, starts).tolist())


class Histogram:
    """Counts observations per bucket; ``bounds``: the upper bounds, inclusive, ascending."""

    __slots__ = ("_bound_list", "_bounds", "_columns", "_counts", "_total", "_values")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = np.asarray(bounds, np.float64)
        self._bound_list = list(bounds)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._total = 0.0
        self._columns: list[NDArray[Any]] = []
        self._values: list[float] = []
        """Observations that are not in the counts yet, by column and one by one."""

    @property
    def counts(self) -> NDArray[np.int64]:
        """int64[B + 1]: observations per bucket; the last bucket is above every bound."""
        self._count()
        return self._counts

    @property
    def total(self) -> float:
        """Sum of the observations."""
        self._count()
        return self._total

    def observe(self, values: NDArray[Any]) -> None:
        """Add observations, numbers[N]. The array is kept: it must not change afterwards."""
        self._columns.append(values)
        if len(self._columns) >= KEPT_COLUMNS:
            self._count()

    def _count(self) -> None:
        """Count the kept observations."""
        if not (self._columns or self._values):
            return
        values = np.concatenate((*self._columns, self._values), dtype=np.float64)
        self._columns.clear()
        self._values.clear()
        self._counts += np.bincount(self._bounds.searchsorted(values), minlength=len(self._counts))
        self._total += float(values.sum())

    def observe_times(self, values: NDArray[np.float64], times: NDArray[np.int32]) -> None:
        """Add each of ``values``, float64[N], ``times`` times, int32[N], not negative."""
        buckets = np.searchsorted(self._bounds, values)
        weighed = np.bincount(buckets, weights=times, minlength=len(self._counts))
        self._counts += weighed.astype(np.int64)
        self._total += float(values @ times)

    def merge(self, counts: Sequence[int], total: float) -> None:
        """Add another histogram of the same bounds: its :attr:`counts` and its :attr:`total`."""
        self._counts += np.asarray(counts, np.int64)
        self._total += total

    def add(self, value: float, times: int = 1) -> None:
        """Add one observation ``times`` times."""
        if times == 1:
            self._values.append(value)
            if len(self._values) >= KEPT_VALUES:
                self._count()
            return
        self._counts[bisect_left(self._bound_list, value)] += times
        self._total += value * times
