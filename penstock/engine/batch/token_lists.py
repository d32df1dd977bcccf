"""Variable-length lists per slot (logit_bias, bad words) in flat arrays, gathered for many slots at once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Slots = NDArray[np.intp]

MIN_CAPACITY = 64


class TokenLists:
    """One list of items per slot; an item has a value in each column.

    Lists are stored one after another. Cleared lists leave gaps, which are closed when the end is reached.
    """

    def __init__(self, slots: int, *columns: DTypeLike) -> None:
        self._start = np.zeros(slots, np.int64)
        self._count = np.zeros(slots, np.int64)
        self._columns: list[NDArray[Any]] = [np.zeros(0, dtype) for dtype in columns]
        self._used = 0

    def set(self, slot: int, *columns: Any) -> None:
        """Store the list of a slot that has none; ``columns`` have equal length."""
        count = len(columns[0])
        if self._used + count > len(self._columns[0]):
            self._make_room(count)
        start, self._used = self._used, self._used + count
        self._start[slot], self._count[slot] = start, count
        for column, values in zip(self._columns, columns, strict=True):
            column[start : self._used] = values

    def clear(self, slot: int) -> None:
        self._count[slot] = 0

    def gather(self, slots: Slots) -> tuple[NDArray[np.int64], tuple[NDArray[Any], ...]]:
        """The items of ``slots``, list after list: the index into ``slots`` of each item, and the columns."""
        count = self._count[slots]
        ends = np.cumsum(count)
        row = np.repeat(np.arange(len(slots)), count)
        at = np.arange(len(row)) + np.repeat(self._start[slots] - (ends - count), count)
        return row, tuple(column[at] for column in self._columns)

    def _make_room(self, wanted: int) -> None:
        """Close the gaps; the capacity is at least twice the items, ``wanted`` more included."""
        living = np.flatnonzero(self._count)
        _, kept = self.gather(living)
        count = self._count[living]
        self._start[living] = np.cumsum(count) - count
        self._used = int(count.sum())
        capacity = max(MIN_CAPACITY, 2 * (self._used + wanted))
        self._columns = [
            np.concatenate((column, np.zeros(capacity - len(column), column.dtype))) for column in kept
        ]
