"""The tokens that live streams have delivered, kept so that a stream can go on on another engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.wire.arrays import I32

MIN_CAPACITY = 1 << 16
"""Entries the log has room for at least; 8 bytes each."""
_BLOCK = 1 << 15
"""Entries looked at together when ended streams are dropped."""
_NO_STREAM = np.iinfo(np.int32).max


class TokenLog:
    """(handle, token) pairs in order of arrival: written by whole columns, read only when an engine is lost.

    Every stream's entries begin where it was opened; older ones of its handle, and all of closed streams,
    are dropped in one pass when the arrays are full. They double when less than half of them became free
    and halve when seven eighths did, so they hold at most four times the tokens of live streams.
    """

    def __init__(self, smallest: int = MIN_CAPACITY) -> None:
        self._smallest = smallest
        self._used = 0
        self._handle = np.empty(smallest, np.int32)
        self._token = np.empty(smallest, np.int32)
        self._from = np.full(1, _NO_STREAM, np.int32)
        """Per handle the index of its stream's first entry; no entry has the index of a closed stream."""

    @property
    def capacity(self) -> int:
        return len(self._token)

    # -- streams come and go

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
        """Drop what no live stream needs, and have room for ``coming`` entries and as many as are kept."""
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
        """Move the entries of open streams to the front; returns how many there are.

        Block by block: the fresh pages of large temporary arrays would take longer than the work.
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
        """bool[n]: which entries, of these handles and from index ``start``, are of open streams."""
        live: NDArray[np.bool_] = self._from[handle] <= np.arange(start, start + len(handle), dtype=np.int32)
        return live

    # -- an engine is lost

    def read(self, handles: Sequence[int]) -> list[I32]:
        """The delivered tokens of open streams, int32[n] each, in the order of ``handles``."""
        place = np.full(len(self._from), -1, np.int32)
        place[np.array(handles, np.intp)] = np.arange(len(handles))
        handle = self._handle[: self._used]
        entry_place = place[handle]
        entries = np.flatnonzero((entry_place >= 0) & self._live(handle, 0))
        entry_place = entry_place[entries]
        tokens = self._token[entries[np.argsort(entry_place, kind="stable")]]
        ends = np.cumsum(np.bincount(entry_place, minlength=len(handles)))
        return np.split(tokens, ends[:-1]) if handles else []
