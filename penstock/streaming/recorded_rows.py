"""Numbers and collects the text events that the row writer makes by columns (:class:`EventRecord`)."""

from __future__ import annotations

from collections import deque
from operator import iadd

import numpy as np
from numpy.typing import NDArray

from penstock.streaming.event_record import EventRecord
from penstock.streaming.framing import MOST_NUMBERS, Objects, event_numbers
from penstock.wire.arrays import I32


class RecordedRows:
    """Columns by stream handle. A record is in the columns, or it is up to date itself, never both."""

    def __init__(self) -> None:
        self._records: list[EventRecord | None] = []
        self._numbers = np.zeros(0, np.int64)
        """Number of the next event; -1: the record is not in the columns."""
        self._texts = np.empty(0, np.object_)
        """The records' own buffers."""
        self._count = 0
        """Records in the columns."""

    def grow(self, capacity: int) -> None:
        """There are ``capacity`` handles now."""
        more = capacity - len(self._records)
        self._records += [None] * more
        self._numbers = np.concatenate((self._numbers, np.full(more, -1)))
        self._texts = np.concatenate((self._texts, np.empty(more, np.object_)))

    def take(self, handle: int, record: EventRecord) -> None:
        """Keep the record in the columns from here on."""
        if self._numbers[handle] < 0:
            self._count += 1
            self._records[handle], self._texts[handle] = record, record.text
            self._numbers[handle] = record.number

    def give_back(self, handle: int) -> None:
        """Bring the record up to date, and keep it no longer."""
        record = self._records[handle]
        if record is not None:
            record.number = int(self._numbers[handle])
            self._count -= 1
            self._records[handle] = self._texts[handle] = None
            self._numbers[handle] = -1

    # -- rows of a frame

    def rows(self, handles: I32) -> NDArray[np.intp] | None:
        """Indexes of the rows whose record is in the columns; None: there are none."""
        if not self._count:
            return None
        rows = np.flatnonzero(self._numbers.take(handles) >= 0)
        return rows if len(rows) else None

    def sizes(self, handles: I32, too_large: int) -> NDArray[np.int64]:
        """Bytes that number each stream's next event; ``too_large`` beyond the numbers that are prepared."""
        numbers = self._numbers.take(handles)
        sizes = event_numbers()[1].take(numbers, mode="clip")
        sizes[numbers >= MOST_NUMBERS] = too_large
        return sizes

    def advance(self, handles: I32, texts: Objects, counts: I32 | None) -> Objects:
        """Number an event of each stream and collect its texts: ``counts`` per event, one if None. Returns
        the fields with the numbers."""
        numbers = self._numbers.take(handles)
        self._numbers.put(handles, numbers + 1)
        buffers = self._texts.take(handles)
        if counts is not None:
            buffers = buffers.repeat(counts)
        deque(map(iadd, buffers.tolist(), texts.tolist()), maxlen=0)
        fields: Objects = event_numbers()[0].take(numbers)
        return fields
