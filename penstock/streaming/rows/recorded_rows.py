"""Numbers and collects the text events that the row writer makes by columns (:class:`EventRecord`).

To append each text to its reply's own buffer would cost more than to write the event: with a thousand
streams none of these buffers is in the processor's caches. So the columns of some steps are kept as they are,
and then appended together: each buffer is touched once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.streaming.rows.event_record import EventRecord
from penstock.streaming.rows.framing import MAX_NUMBERS, Objects, event_numbers
from penstock.wire.arrays import I32

STEPS = 16
"""Steps whose texts are appended together."""
_NO_TEXT = b""


class _Step:
    """The texts of one frame."""

    __slots__ = ("_counts", "_handles", "_index", "texts")

    def __init__(self, handles: I32, texts: Objects, counts: I32 | None) -> None:
        self._handles = handles
        self._counts = counts
        self._index: NDArray[np.int32] | None = None
        """The stream's row plus 1, by handle; 0: it has none. Made when it is first asked for."""
        self.texts = texts

    def handles(self) -> I32:
        """int32[texts]: the stream of each text."""
        return self._handles if self._counts is None else self._handles.repeat(self._counts)

    def take_text(self, handle: int) -> bytes:
        """The texts of one stream, which are then gone."""
        index = self._index
        if index is None:
            index = self._index = np.zeros(int(self._handles.max()) + 1, np.int32)
            index[self._handles] = np.arange(1, len(self._handles) + 1)
        row = int(index[handle]) - 1 if handle < len(index) else -1
        if row < 0:
            return _NO_TEXT
        start, end = row, row + 1
        if self._counts is not None:
            end = int(self._counts[: row + 1].sum())
            start = end - int(self._counts[row])
        text = b"".join(self.texts[start:end].tolist())
        self.texts[start:end] = _NO_TEXT
        return text


class RecordedRows:
    """Columns by stream handle."""

    def __init__(self) -> None:
        self._records: list[EventRecord | None] = []
        self._buffers: list[bytearray | None] = []
        self._numbers = np.zeros(0, np.int64)
        """Number of the next event; -1: the stream's record is not here."""
        self._count = 0
        """Records that are here."""
        self._pending: list[_Step] = []
        """The latest steps."""
        self._first = 0
        """Number of the first of them."""
        self._collected: list[int] = []
        """Number of the step up to which each stream's texts are in its buffer."""

    def grow(self, capacity: int) -> None:
        """There are ``capacity`` handles now."""
        more = capacity - len(self._records)
        self._records += [None] * more
        self._buffers += [None] * more
        self._collected += [0] * more
        self._numbers = np.concatenate((self._numbers, np.full(more, -1)))

    def adopt_record(self, handle: int, record: EventRecord) -> None:
        """Keep the record's number and text here from now on."""
        if self._numbers[handle] < 0:
            self._count += 1
            self._records[handle] = record
            self._buffers[handle] = record.attach(self, handle)
        # Of a record that is here and was not brought up to date, the number here is the later one.
        self._numbers[handle] = max(record.number, int(self._numbers[handle]))

    def update(self, handle: int) -> None:
        """Bring the number of a record up to date, if it is here, before its reply makes an event. To be
        followed by :meth:`adopt_record`."""
        record = self._records[handle]
        if record is not None:
            record.number = int(self._numbers[handle])

    def release_record(self, handle: int) -> None:
        """Bring the record up to date, and keep it no longer."""
        record = self._records[handle]
        if record is not None:
            # The reply may have made further events since :meth:`update`: those after the last row.
            record.number = max(record.number, int(self._numbers[handle]))
            self.collect(handle)
            record.attach(None)
            self._count -= 1
            self._records[handle] = self._buffers[handle] = None
            self._numbers[handle] = -1

    # -- rows of a frame

    def rows(self, handles: I32) -> NDArray[np.intp] | None:
        """Indexes of the rows whose record is here; None: there are none."""
        if not self._count:
            return None
        rows = np.flatnonzero(self._numbers.take(handles) >= 0)
        return rows if len(rows) else None

    def sizes(self, handles: I32, too_large: int) -> NDArray[np.int64]:
        """Bytes that number each stream's next event; ``too_large`` beyond the numbers that are prepared."""
        numbers = self._numbers.take(handles)
        sizes = event_numbers()[1].take(numbers, mode="clip")
        sizes[numbers >= MAX_NUMBERS] = too_large
        return sizes

    def advance(self, handles: I32, texts: Objects, counts: I32 | None) -> Objects:
        """Number an event of each stream and keep its texts: ``counts`` per event, one if None. Returns the
        fields with the numbers."""
        numbers = self._numbers.take(handles)
        self._numbers.put(handles, numbers + 1)
        self._pending.append(_Step(handles, texts, counts))
        if len(self._pending) >= STEPS:
            self._append_all()
        fields: Objects = event_numbers()[0].take(numbers)
        return fields

    # -- texts

    def add(self, handle: int, text: bytes) -> None:
        """Text of a stream that was written by other means."""
        self.collect(handle)
        buffer = self._buffers[handle]
        assert buffer is not None
        buffer += text

    def collect(self, handle: int) -> None:
        """Append the texts of one stream to its buffer."""
        first, steps = self._first, self._pending
        last = first + len(steps)
        collected = self._collected[handle]
        if collected == last:
            return
        self._collected[handle] = last
        buffer = self._buffers[handle]
        assert buffer is not None
        for step in steps[max(collected - first, 0) :]:
            buffer += step.take_text(handle)

    def _append_all(self) -> None:
        handles = np.concatenate([step.handles() for step in self._pending])
        texts = np.concatenate([step.texts for step in self._pending])
        self._first += len(self._pending)
        self._pending.clear()
        if len(self._records) <= np.iinfo(np.int16).max:
            handles = handles.astype(np.int16)  # sorted in a tenth of the time
        order = handles.argsort(kind="stable")
        handles, pieces = handles.take(order), texts.take(order).tolist()
        starts = np.flatnonzero(np.concatenate(([True], handles[1:] != handles[:-1])))
        bounds = [*starts.tolist(), len(pieces)]
        buffers, join = self._buffers, b"".join
        for index, handle in enumerate(handles.take(starts).tolist()):
            buffer = buffers[handle]
            if buffer is not None:
                buffer += join(pieces[bounds[index] : bounds[index + 1]])
