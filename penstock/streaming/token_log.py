"""The delivered tokens of all open streams, from which another engine resumes a stream."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.wire.arrays import I32

MIN_CAPACITY = 1 << 16
"""Minimum capacity in entries of 8 bytes."""
_BLOCK = 1 << 15
"""Entries per pass when entries of closed streams are dropped."""
_NO_STREAM = np.iinfo(np.int32).max


class TokenLog:
    """(handle, token) pairs in order of arrival: appended by whole columns, read only when an engine is lost.

    A stream's entries begin at the index where it was opened. When the arrays are full, one pass drops older
    entries of reused handles and those of closed streams. The arrays double if less than half became free
    and halve if seven eighths did, so they hold at most four times the tokens of open streams.
    """

    def __init__(self, smallest: int = MIN_CAPACITY) -> None:
        self._smallest = smallest
        self._used = 0
        self._handle = np.empty(smallest, np.int32)
        self._token = np.empty(smallest, np.int32)
        self._from = np.full(1, _NO_STREAM, np.int32)
        """Per handle, the index of its stream's first entry; the maximum int32 for a closed stream."""

    @property
    def capacity(self) -> int:
        return len(self._token)

    # -- streams open and close

    def open(self, handle: int) -> None:
        if handle >= len(self._from):
            longer = np.full(max(handle + 1, 2 * len(self._from)), _NO_STREAM, np.int32)
            longer[: len(self._from)] = self._from
            self._from = longer
        self._from[handle] = self._used

    def close(self, handle: int) -> None:
        self._from[handle] = _NO_STREAM

    # -- tokens arrive

    def append(self, handles: I32, tokens: I32, count: I32 | None) -> None:
        """A frame's columns: ``handles`` int32[R], ``tokens`` int32[T] in the order of the rows, ``count``
        int32[R] tokens per row, or None for one each."""
        if count is not None:
            handles = handles.repeat(count)
        end = self._used + len(tokens)
        if end > len(self._token):
            self._compact(len(tokens))
            end = self._used + len(tokens)
        self._handle[self._used : end] = handles
        self._token[self._used : end] = tokens
        self._used = end

    def _compact(self, coming: int) -> None:
        """Drop entries of closed streams. Makes room for ``coming`` entries and for as many as are kept."""
        kept = self._drop()
        capacity = self.capacity
        if 8 * kept < capacity:
            capacity = max(self._smallest, capacity // 2)
        while capacity < 2 * kept or capacity < kept + coming:
            capacity *= 2
        if capacity != self.capacity:
            handle, token = self._handle[:kept], self._token[:kept]
            self._handle, self._token = np.empty(capacity, np.int32), np.empty(capacity, np.int32)
            self._handle[:kept], self._token[:kept] = handle, token
        self._used = kept
        self._from[self._from != _NO_STREAM] = 0

    def _drop(self) -> int:
        """Move the entries of open streams to the front; return their number.

        Works block by block: allocating pages for large temporary arrays would take longer than the copy.
        """
        kept = 0
        for start in range(0, self._used, _BLOCK):
            part = slice(start, min(start + _BLOCK, self._used))
            handle, token = self._handle[part], self._token[part]
            live = self._live(handle, start)
            end = kept + int(np.count_nonzero(live))
            self._handle[kept:end], self._token[kept:end] = handle[live], token[live]
            kept = end
        return kept

    def _live(self, handle: I32, start: int) -> NDArray[np.bool_]:
        """bool[n]: which entries belong to open streams; ``handle`` int32[n], from index ``start``."""
        live: NDArray[np.bool_] = self._from[handle] <= np.arange(start, start + len(handle), dtype=np.int32)
        return live

    # -- an engine is lost

    def read(self, handles: Sequence[int]) -> list[I32]:
        """The delivered tokens of open streams, int32[n] each, in the order of ``handles``."""
        index = np.full(len(self._from), -1, np.int32)
        index[np.array(handles, np.intp)] = np.arange(len(handles))
        handle = self._handle[: self._used]
        entry_index = index[handle]
        entries = np.flatnonzero((entry_index >= 0) & self._live(handle, 0))
        entry_index = entry_index[entries]
        tokens = self._token[entries[np.argsort(entry_index, kind="stable")]]
        ends = np.cumsum(np.bincount(entry_index, minlength=len(handles)))
        return np.split(tokens, ends[:-1]) if handles else []
