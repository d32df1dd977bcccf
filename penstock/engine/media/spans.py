"""The pictures of running streams: which of their features fall into a batch, and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.engine.batch.slots import SlotTable
from penstock.engine.schedule.batch import Batch
from penstock.wire.arrays import I32
from penstock.wire.media.items import MediaItem


class FeatureRows(NamedTuple):
    """The features of one picture that a batch computes with."""

    slot: int
    item: MediaItem
    first: int
    last: int
    """Features ``first`` to ``last - 1`` of the picture."""
    total: int
    """Features of the picture."""
    rows: NDArray[np.intp]
    """intp[last - first]: indexes of their tokens in the flat batch."""


class Picture:
    """A picture of a running stream."""

    __slots__ = ("counted", "end", "item", "positions")

    def __init__(self, item: MediaItem, positions: I32) -> None:
        self.item = item
        self.positions = positions
        """int32[features]: positions in the history of the tokens that get its features; they ascend."""
        self.end = item.offset + item.length
        self.counted = False
        """Whether metrics have it."""


class MediaSpans:
    """The pictures of each slot's stream. Steps of streams without pictures cost one comparison."""

    def __init__(self, table: SlotTable, token: int) -> None:
        """``token``: the one whose positions in a span get the picture's features."""
        self.token = token
        self._table = table
        self._pictures: dict[int, list[Picture]] = {}
        self.end = np.zeros(table.size, np.int32)
        """Where the last span of each slot ends; 0: it has none."""

    def __bool__(self) -> bool:
        """Whether any stream has pictures."""
        return bool(self._pictures)

    def begin(self, slot: int, media: Sequence[MediaItem]) -> None:
        """A stream with these pictures has the slot, and its prompt is in the table."""
        if not media:
            return
        history = self._table.history[slot]
        pictures = []
        for item in media:
            span = history[item.offset : item.offset + item.length]
            positions = np.flatnonzero(span == self.token).astype(np.int32) + np.int32(item.offset)
            pictures.append(Picture(item, positions))
        self._pictures[slot] = pictures
        self.end[slot] = pictures[-1].end

    def release(self, slot: int) -> None:
        """The slot's stream has ended."""
        if self._pictures.pop(slot, None) is not None:
            self.end[slot] = 0

    def of(self, slot: int) -> Sequence[MediaItem]:
        """The pictures of a slot's stream, in the order of its prompt."""
        return [picture.item for picture in self._pictures.get(slot, ())]

    def within(self, slot: int, start: int, stop: int) -> Sequence[Picture]:
        """The pictures whose spans have positions from ``start`` to ``stop - 1``."""
        return [
            picture
            for picture in self._pictures.get(slot, ())
            if picture.end > start and picture.item.offset < stop
        ]

    def in_batch(self, batch: Batch) -> Sequence[FeatureRows]:
        """What the batch's tokens need of their streams' pictures."""
        if not self._pictures:
            return ()
        found = []
        parts = np.flatnonzero(self.end[batch.slots] > batch.start)
        if len(parts):
            flat = np.cumsum(batch.count) - batch.count
        for part in parts.tolist():
            slot, start, count = int(batch.slots[part]), int(batch.start[part]), int(batch.count[part])
            for picture in self.within(slot, start, start + count):
                positions = picture.positions
                first, last = np.searchsorted(positions, (start, start + count)).tolist()
                if first < last:
                    rows = positions[first:last].astype(np.intp) + (int(flat[part]) - start)
                    found.append(FeatureRows(slot, picture.item, first, last, len(positions), rows))
        return found
