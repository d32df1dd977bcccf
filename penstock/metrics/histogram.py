"""Histograms that observe whole columns: one array operation per frame, none per token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Histogram:
    """Counts observations per bucket; ``bounds``: the upper bounds, inclusive, ascending."""

    __slots__ = ("_bound_list", "_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = np.asarray(bounds, np.float64)
        self._bound_list = list(bounds)
        self.counts = np.zeros(len(bounds) + 1, np.int64)
        """int64[B + 1]: observations per bucket; the last bucket is above every bound."""
        self.total = 0.0
        """Sum of the observations."""

    def observe(self, values: ArrayLike) -> None:
        """Adds observations, float64[N]; half the cost if all fall into one bucket."""
        array = np.atleast_1d(np.asarray(values, np.float64))
        if not array.size:
            return
        lowest = bisect_left(self._bound_list, float(array.min()))  # comparing numpy's floats is slow
        if lowest == bisect_left(self._bound_list, float(array.max())):  # usual for the latencies of one step
            self.counts[lowest] += array.size
        else:
            buckets = np.searchsorted(self._bounds, array)
            self.counts += np.bincount(buckets, minlength=len(self.counts))
        self.total += float(array.sum())

    def observe_times(self, values: NDArray[np.float64], times: NDArray[np.int32]) -> None:
        """Adds each of ``values``, float64[N], ``times`` times, int32[N], not negative."""
        buckets = np.searchsorted(self._bounds, values)
        weighed = np.bincount(buckets, weights=times, minlength=len(self.counts))
        self.counts += weighed.astype(np.int64)
        self.total += float(values @ times)

    def merge(self, counts: Sequence[int], total: float) -> None:
        """Adds another histogram of the same bounds: its :attr:`counts` and its :attr:`total`."""
        self.counts += np.asarray(counts, np.int64)
        self.total += total

    def add(self, value: float, times: int = 1) -> None:
        """Adds one observation ``times`` times."""
        self.counts[bisect_left(self._bound_list, value)] += times
        self.total += value * times
