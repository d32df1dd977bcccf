"""The tokens that live streams have delivered, kept so that a stream can go on on another engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..wire.frames import I32

SMALLEST = 1 << 16
"""Entries the log has room for at least; 8 bytes each."""
_NO_STREAM = np.iinfo(np.int32).max


class TokenLog:
    """(handle, token) pairs in order of arrival: written by whole columns, read only when an engine is lost.

    Every stream's entries begin where it was opened; older ones of its handle, and all of closed streams,
    are dropped in one pass when the arrays are full. They double when less than half of them became free
    and halve when seven eighths did, so they hold at most four times the tokens of live streams.
    """

    def __init__(self, smallest: int = SMALLEST) -> None:
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
            handles = np.repeat(handles, count)
        end = self._used + len(tokens)
        if end > len(self._token):
            self._compact(len(tokens))
            end = self._used + len(tokens)
        self._handle[self._used : end] = handles
        self._token[self._used : end] = tokens
        self._used = end

    def _compact(self, coming: int) -> None:
        """Drop what no live stream needs, and have room for ``coming`` entries and as many as are kept."""
        live = np.flatnonzero(self._live())
        kept, capacity = len(live), self.capacity
        if 8 * kept < capacity:
            capacity = max(self._smallest, capacity // 2)
        while capacity < 2 * kept or capacity < kept + coming:
            capacity *= 2
        handle, token = self._handle[live], self._token[live]
        if capacity != self.capacity:
            self._handle, self._token = np.empty(capacity, np.int32), np.empty(capacity, np.int32)
        self._handle[:kept], self._token[:kept] = handle, token
        self._used = kept
        self._from[self._from != _NO_STREAM] = 0

    def _live(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """bool[used]: entries of streams that are open."""
        index = np.arange(self._used, dtype=np.int32)
        live: np.ndarray[tuple[int], np.dtype[np.bool_]] = self._from[self._handle[: self._used]] <= index
        return live

    # -- an engine is lost

    def read(self, handles: Sequence[int]) -> list[I32]:
        """The delivered tokens of open streams, int32[n] each, in the order of ``handles``."""
        place = np.full(len(self._from), -1, np.int32)
        place[np.array(handles, np.intp)] = np.arange(len(handles))
        entry_place = place[self._handle[: self._used]]
        entries = np.flatnonzero((entry_place >= 0) & self._live())
        entry_place = entry_place[entries]
        tokens = self._token[entries[np.argsort(entry_place, kind="stable")]]
        ends = np.cumsum(np.bincount(entry_place, minlength=len(handles)))
        return np.split(tokens, ends[:-1]) if handles else []
