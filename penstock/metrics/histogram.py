"""Histograms fed by whole columns: one array operation per frame, nothing per token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Histogram:
    """Counts of observations per bucket; ``bounds`` are the upper bounds, inclusive, ascending."""

    __slots__ = ("_bound_list", "_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = np.asarray(bounds, np.float64)
        self._bound_list = list(bounds)
        self.counts = np.zeros(len(bounds) + 1, np.int64)
        """int64[B + 1]: observations per bucket, the last one above every bound."""
        self.total = 0.0

    def observe(self, values: ArrayLike) -> None:
        """Adds observations, float64[N]; those that all fall into one bucket cost half as much."""
        array = np.atleast_1d(np.asarray(values, np.float64))
        if not array.size:
            return
        lowest = bisect_left(self._bound_list, float(array.min()))  # numpy's floats compare slowly
        if lowest == bisect_left(self._bound_list, float(array.max())):  # as latencies of one step often do
            self.counts[lowest] += array.size
        else:
            places = np.searchsorted(self._bounds, array)
            self.counts += np.bincount(places, minlength=len(self.counts))
        self.total += float(array.sum())

    def observe_times(self, values: NDArray[np.float64], times: NDArray[np.int32]) -> None:
        """Adds every value of float64[N] as often as ``times`` says, int32[N], from 0."""
        places = np.searchsorted(self._bounds, values)
        weighed = np.bincount(places, weights=times, minlength=len(self.counts))
        self.counts += weighed.astype(np.int64)
        self.total += float(values @ times)

    def merge(self, counts: Sequence[int], total: float) -> None:
        """Adds observations that are in buckets already; ``counts`` are as :attr:`counts`, ``total`` is their
        sum."""
        self.counts += np.asarray(counts, np.int64)
        self.total += total

    def add(self, value: float, times: int = 1) -> None:
        """Adds one observation, ``times`` times over."""
        self.counts[bisect_left(self._bound_list, value)] += times
        self.total += value * times
