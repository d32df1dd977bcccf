"""Variable-length lists per slot (logit_bias, bad words) in flat arrays, gathered for many slots at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from penstock.engine.batch.shared_rows import SharedRows

Slots = NDArray[np.intp]

MIN_CAPACITY = 64


class TokenLists:
    """One list of items per slot; an item has a value in each column.

    Lists are stored one after another; slots share the list of the same source object. Lists that no slot
    uses leave gaps, which are closed when the end is reached.
    """

    def __init__(self, slots: int, *columns: DTypeLike) -> None:
        self._rows = SharedRows(slots)
        self._start = np.zeros(slots + 1, np.int64)
        self._count = np.zeros(slots + 1, np.int64)
        self._columns: list[NDArray[Any]] = [np.zeros(0, dtype) for dtype in columns]
        self._used = 0

    def share(self, slot: int, source: object) -> int | None:
        """Give a slot that has none the list of ``source``. Returns the list if it is empty so far, for
        :meth:`fill`."""
        return self._rows.acquire(slot, source)

    def fill(self, row: int, *columns: Any) -> None:
        """Store the list ``row``; ``columns`` have equal length."""
        count = len(columns[0])
        if self._used + count > len(self._columns[0]):
            self._make_room(count)
        start, self._used = self._used, self._used + count
        self._start[row], self._count[row] = start, count
        for column, values in zip(self._columns, columns, strict=True):
            column[start : self._used] = values

    def clear(self, slot: int) -> None:
        row = self._rows.release(slot)
        if row is not None:
            self._count[row] = 0

    def counts(self, slots: Slots) -> NDArray[np.int64]:
        """int64[n]: items of each slot's list."""
        return self._count[self._rows.of_slot[slots]]

    def gather(self, slots: Slots) -> tuple[NDArray[np.int64], tuple[NDArray[Any], ...]]:
        """The items of ``slots``, list after list: each item's index into ``slots``, and the columns."""
        return self._gather(self._rows.of_slot[slots])

    def items(self, slots: Slots, index: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
        """The columns of one item of each slot's list, at ``index`` int64[n] in it."""
        at = self._start[self._rows.of_slot[slots]] + index
        return tuple(column[at] for column in self._columns)

    def grid(self, slots: Slots) -> NDArray[Any]:
        """[n, W]: the first column of each slot's list, then zeros."""
        counts = self.counts(slots)
        _, (values, *_) = self.gather(slots)
        found = np.zeros((len(slots), int(counts.max(initial=0))), values.dtype)
        found[np.arange(found.shape[1]) < counts[:, None]] = values
        return found

    def each(self, slots: Slots) -> Iterator[tuple[NDArray[np.intp], tuple[NDArray[Any], ...]]]:
        """Each distinct list of ``slots``: indexes into ``slots`` of those that share it, and its columns."""
        rows = self._rows.of_slot[slots]
        for row in np.unique(rows).tolist():
            items = slice(self._start[row], self._start[row] + self._count[row])
            yield np.flatnonzero(rows == row), tuple(column[items] for column in self._columns)

    def _gather(self, rows: NDArray[np.intp]) -> tuple[NDArray[np.int64], tuple[NDArray[Any], ...]]:
        count = self._count[rows]
        ends = np.cumsum(count)
        row = np.repeat(np.arange(len(rows)), count)
        at = np.arange(len(row)) + np.repeat(self._start[rows] - (ends - count), count)
        return row, tuple(column[at] for column in self._columns)

    def _make_room(self, wanted: int) -> None:
        """Close the gaps; the capacity is at least twice the items, ``wanted`` more included."""
        living = np.flatnonzero(self._count)
        _, kept = self._gather(living)
        count = self._count[living]
        self._start[living] = np.cumsum(count) - count
        self._used = int(count.sum())
        capacity = max(MIN_CAPACITY, 2 * (self._used + wanted))
        self._columns = [
            np.concatenate((column, np.zeros(capacity - len(column), column.dtype))) for column in kept
        ]
