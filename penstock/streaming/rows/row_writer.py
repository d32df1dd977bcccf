"""Turns a frame's tokens into events and writes them to the clients' connections: the last stop of a token.

A row whose tokens are plain text becomes one event: prepared head, text, prepared tail. On an HTTP/1.1
connection the event is a chunk, and all chunks of a frame are written together
(:mod:`penstock.streaming.rows.io_submit`). On an HTTP/2 connection it is a DATA frame, and all frames of a
connection are one write. Both are made by columns: a step of 1,024 rows creates no object per row. Other rows
take the slow path, the stream's reply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from itertools import repeat
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.http.http2.flow_windows import FlowWindows, first_rows
from penstock.http.write_target import WriteTarget
from penstock.streaming.rows.framing import CHUNK_HEADERS, CHUNK_LENGTHS, FRAME_LENGTHS, MAX_EVENT, Objects
from penstock.streaming.rows.io_submit import BurstWriter
from penstock.streaming.rows.recorded_rows import RecordedRows
from penstock.streaming.rows.row_grid import RowGrid, fits_grid
from penstock.streaming.rows.unchanged_batch import (
    ChunkColumns,
    FrameColumns,
    RecordedColumns,
    UnchangedBatch,
)
from penstock.streaming.stream import Stream
from penstock.wire.arrays import I32
from penstock.wire.frames import FinishReason, TokenFrame
from penstock.wire.logprobs import Logprobs
from penstock.wire.regroup import token_order

_FINISH = tuple(FinishReason)
"""Finish reasons by value; looking it up in the enumeration takes ten times as long."""
_NO_ROWS = np.empty(0, np.intp)
_NOT_DIRECT = 1 << 40
"""Size that stands for rows that are not written by columns; the sum of many does not overflow."""

SlowPath: TypeAlias = Callable[[Stream, Sequence[int], FinishReason, int, Logprobs | None], None]
"""Handles a row by its stream's reply: tokens, finish reason, cached prompt tokens, logprobs."""


class Path(IntEnum):
    """How a stream's plain rows are written."""

    REPLY = 0
    """The reply handles every row."""
    SINK = 1
    """One by one, by the stream's ``write``."""
    CHUNK = 2
    """As chunks, to an HTTP/1.1 socket."""
    FRAME = 3
    """As DATA frames, to an HTTP/2 connection."""


class RowWriter:
    """Writes the rows of frames, for the streams of one output processor. Columns are by stream handle."""

    def __init__(
        self,
        streams: Sequence[Stream | None],
        texts: Objects,
        burst: BurstWriter,
        windows: FlowWindows,
        slow_path: SlowPath,
        on_fault: Callable[[Stream], None],
        guarded: NDArray[np.bool_] | None = None,
    ) -> None:
        """``streams``: by handle. ``texts``: by token id, None if the text is not context-free. ``guarded``:
        bool by token id, whether the replies of guarded streams must see it; None: of none. ``burst``
        writes to HTTP/1.1 sockets, ``windows`` are those of HTTP/2. ``on_fault`` is called when writing to
        one stream raises, with the exception at hand."""
        self._streams = streams
        self._burst = burst
        self._windows = windows
        self._slow_path = slow_path
        self._on_fault = on_fault
        self._text_sizes = np.array([_NOT_DIRECT if text is None else len(text) for text in texts], np.int64)
        self._unsafe = np.zeros(len(texts), np.bool_) if guarded is None else guarded
        self._path = np.zeros(0, np.int8)
        self._heads, self._tails = np.empty(0, np.object_), np.empty(0, np.object_)
        """What precedes and follows the text, framing included except for the size."""
        self._sizes = np.zeros(0, np.int64)
        """Bytes of an event besides its text, without framing; _NOT_DIRECT unless the path is CHUNK or
        FRAME."""
        self._targets = np.zeros(0, np.int64)
        """CHUNK: descriptor of the socket. FRAME: complement (~) of the slot in the windows."""
        self._numbers = np.zeros(0, np.intp)
        """0, 1, 2, …"""
        self._guarded = np.zeros(0, np.bool_)
        self._guards = 0
        """Number of guarded streams."""
        self._records = RecordedRows()
        self._changes = 0
        """Changes of the columns."""
        self.grow(len(streams))

    def grow(self, capacity: int) -> None:
        """There are ``capacity`` handles now."""
        more = capacity - len(self._path)
        self._path = np.concatenate((self._path, np.zeros(more, np.int8)))
        self._heads = np.concatenate((self._heads, np.empty(more, np.object_)))
        self._tails = np.concatenate((self._tails, np.empty(more, np.object_)))
        self._sizes = np.concatenate((self._sizes, np.full(more, _NOT_DIRECT)))
        self._targets = np.concatenate((self._targets, np.zeros(more, np.int64)))
        self._numbers = np.arange(capacity)
        self._guarded = np.concatenate((self._guarded, np.zeros(more, np.bool_)))
        self._records.grow(capacity)

    # -- the path of a stream

    def path(self, handle: int) -> Path:
        return Path(int(self._path[handle]))

    def choose(self, stream: Stream, write_target: WriteTarget | None) -> None:
        """Write the stream's next plain rows by its ``write_target``; without one, by its ``write``."""
        handle = stream.handle
        self._changes += 1
        if stream.guarded or self._guards:
            self._guard(handle, on=stream.guarded)
        if write_target is None:
            self._records.release_record(handle)
            self._path[handle], self._sizes[handle] = Path.SINK, _NOT_DIRECT
            return
        if stream.record is not None:
            self._records.adopt_record(handle, stream.record)
        chunked = write_target.descriptor >= 0
        if write_target is not stream.write_target:
            stream.write_target = write_target
            if chunked:
                self._heads[handle], self._tails[handle] = stream.head, stream.tail + b"\r\n"
                self._targets[handle] = write_target.descriptor
            else:
                self._heads[handle], self._tails[handle] = write_target.prefix + stream.head, stream.tail
                self._targets[handle] = ~write_target.window
        self._path[handle] = Path.CHUNK if chunked else Path.FRAME
        self._sizes[handle] = len(stream.head) + len(stream.tail)

    def stop(self, handle: int) -> None:
        """Leave the stream's next rows to its reply."""
        self._changes += 1
        if self._guards:
            self._guard(handle, on=False)
        self._records.release_record(handle)
        self._path[handle], self._sizes[handle] = Path.REPLY, _NOT_DIRECT

    def close(self, handle: int) -> None:
        """The stream has ended."""
        self.stop(handle)
        self._heads[handle] = self._tails[handle] = None

    def _guard(self, handle: int, *, on: bool) -> None:
        if self._guarded[handle] != on:
            self._guarded[handle] = on
            self._guards += 1 if on else -1

    # -- rows

    def write(self, frame: TokenFrame, texts: Objects, unchanged: UnchangedBatch | None = None) -> None:
        """Write the rows of a frame, one per stream. ``texts``: of its tokens. ``unchanged``: what the frame
        continues."""
        if unchanged is not None and self._write_unchanged(frame, texts, unchanged):
            return
        handles, counts = frame.stream, frame.count
        sizes = self._sizes_of(frame)
        if counts is not None:
            sizes = _row_sizes(sizes, counts)
        sizes += self._sizes.take(handles)
        recorded = self._records.rows(handles)
        if recorded is not None:
            sizes[recorded] += self._records.sizes(handles.take(recorded), _NOT_DIRECT)
        if frame.finish is not None:
            sizes[frame.finish != 0] = _NOT_DIRECT
        if frame.cached is not None:
            sizes[frame.cached != 0] = _NOT_DIRECT
        direct = sizes < MAX_EVENT
        count, others = np.count_nonzero(direct), _NO_ROWS
        if count < len(handles):
            others = np.flatnonzero(~direct)
        if count:
            targets, numbers = self._targets.take(handles), self._numbers[: len(handles)]
            rows = _Rows(handles, sizes, targets, texts, counts, numbers)
            refused = self._write_direct(rows.take(np.flatnonzero(direct)) if len(others) else rows)
            if len(refused):
                others = np.concatenate((others, refused))
        if len(others):
            self._write_others(frame, texts, others)

    def _sizes_of(self, frame: TokenFrame) -> NDArray[np.int64]:
        """Bytes of the texts of each token; _NOT_DIRECT for those that the reply must see."""
        sizes = self._text_sizes.take(frame.tokens)
        if self._guards:
            guarded = self._guarded.take(frame.stream)
            if frame.count is not None:
                guarded = guarded.repeat(frame.count)
            sizes[guarded & self._unsafe.take(frame.tokens)] = _NOT_DIRECT
        return sizes

    def _write_direct(self, rows: _Rows) -> NDArray[np.intp]:
        """Write rows by columns. Returns the numbers of those for which an HTTP/2 window has no room."""
        framed = rows.targets < 0
        count = np.count_nonzero(framed)
        if not count:
            self._write_chunks(rows)
            return _NO_ROWS
        if count == len(framed):
            return self._write_frames(rows)
        self._write_chunks(rows.take(np.flatnonzero(~framed)))
        return self._write_frames(rows.take(np.flatnonzero(framed)))

    def _write_unchanged(self, frame: TokenFrame, texts: Objects, unchanged: UnchangedBatch) -> bool:
        """Write the rows of a frame whose streams all have the path CHUNK, or all the path FRAME, as in the
        frame before; False if they have not, and nothing is written."""
        if unchanged.columns_at != self._changes:
            unchanged.columns_at, unchanged.columns = self._changes, self._unchanged_columns(frame.stream)
        columns, counts, width = unchanged.columns, frame.count, unchanged.most
        if columns is None or not fits_grid(frame.rows, len(frame.tokens), width):
            return False
        sizes = self._sizes_of(frame)
        if counts is not None:
            sizes = np.add.reduceat(sizes, counts.cumsum() - counts)
        try:  # an IndexError: a text that depends on others, or an event that is too large
            if isinstance(columns, FrameColumns):
                return self._write_unchanged_frames(sizes, _Texts(texts, counts, width), columns)
            self._complete_sizes(sizes, columns)
            headers = CHUNK_HEADERS.take(sizes)
        except IndexError:
            return False
        self._fill(headers, _Texts(texts, counts, width), columns)
        data = b"".join(columns.grid.pieces())
        self._send_chunks(frame.stream, columns.targets, data, CHUNK_LENGTHS.take(sizes))
        return True

    def _write_unchanged_frames(self, sizes: NDArray[np.int64], texts: _Texts, columns: FrameColumns) -> bool:
        """``sizes``: of the rows' texts. Raises IndexError."""
        grid = columns.grid
        if columns.order is not None:
            sizes, texts = sizes.take(columns.order), texts.take(columns.order)
        self._complete_sizes(sizes, columns)
        lengths = FRAME_LENGTHS.take(sizes)
        if not self._windows.take_windows(columns.slots, sizes, columns.starts):
            return False
        self._fill(lengths, texts, columns)
        self._windows.write(grid.pieces(), columns.connections, grid.bounds)
        return True

    def _complete_sizes(self, sizes: NDArray[np.int64], columns: ChunkColumns | FrameColumns) -> None:
        """Make the sizes of texts those of events."""
        sizes += columns.sizes
        if columns.recorded is not None:
            sizes[columns.recorded.rows] += self._records.sizes(columns.recorded.handles, _NOT_DIRECT)

    def _fill(self, lengths: Objects, texts: _Texts, columns: ChunkColumns | FrameColumns) -> None:
        """Complete the grid."""
        columns.grid.fill(lengths, *texts)
        recorded = columns.recorded
        if recorded is not None:
            shown = texts.take(recorded.rows)
            numbers = self._records.advance(recorded.handles, shown.texts, shown.counts)
            columns.grid.set_tails(recorded.rows, numbers + recorded.tails)

    def _unchanged_columns(self, handles: I32) -> ChunkColumns | FrameColumns | None:
        paths = self._path.take(handles).tobytes()
        if paths != paths[:1] * len(handles) or paths[0] < Path.CHUNK:
            return None
        targets, order = self._targets.take(handles), None
        if paths[0] == Path.FRAME and self._windows.connection_count > 1:
            order = self._windows.connection_of.take(~targets).argsort(kind="stable")
            handles, targets = handles.take(order), targets.take(order)
        sizes, recorded = self._sizes.take(handles), None
        heads, tails = self._heads.take(handles), self._tails.take(handles)
        if (rows := self._records.rows(handles)) is not None:
            recorded = RecordedColumns(rows, handles.take(rows), self._tails.take(handles.take(rows)))
        if paths[0] == Path.CHUNK:
            return ChunkColumns(sizes, targets, RowGrid(heads, tails, _NO_ROWS), recorded)
        connections = self._windows.connection_of.take(~targets)
        starts = first_rows(connections)
        grid = RowGrid(heads, tails, starts)
        return FrameColumns(order, sizes, ~targets, starts, connections.take(starts), grid, recorded)

    def _write_chunks(self, rows: _Rows) -> None:
        """Write rows to HTTP/1.1 sockets."""
        data = b"".join(self._parts(CHUNK_HEADERS, rows))
        self._send_chunks(rows.handles, rows.targets, data, CHUNK_LENGTHS.take(rows.sizes))

    def _send_chunks(
        self, handles: I32, descriptors: NDArray[np.int64], data: bytes, lengths: NDArray[np.int64]
    ) -> None:
        """Write a chunk to each stream's socket; what a socket does not take goes to its connection, as does
        everything after it."""
        for index, sent in self._burst(descriptors, data, lengths):
            stream = self._streams[handles[index]]
            assert stream is not None and stream.write_target is not None  # noqa: PT018
            self.choose(stream, None)
            end = int(lengths[: index + 1].sum())
            rest = data[end - int(lengths[index]) + sent : end]
            try:
                stream.write_target.write_rest(rest)
            except Exception:  # noqa: BLE001 - this stream ends, the others go on
                self._on_fault(stream)

    def _write_frames(self, rows: _Rows) -> NDArray[np.intp]:
        """Write rows to HTTP/2 connections, each of which gets one write. Returns the numbers of those for
        which the window of their stream or connection has no room."""
        windows = self._windows
        if windows.connection_count > 1:
            rows = rows.take(windows.connection_of.take(~rows.targets).argsort(kind="stable"))
        slots, sizes = ~rows.targets, rows.sizes
        connections = windows.connection_of.take(slots)
        starts = first_rows(connections)
        if not windows.take_windows(slots, sizes, starts):
            refused = windows.without_room(slots, sizes, starts)
            granted = np.flatnonzero(~refused)
            if len(granted):
                self._write_frames(rows.take(granted))
            return rows.numbers[refused]
        parts = self._parts(FRAME_LENGTHS, rows)
        firsts = 4 * starts if rows.counts is None else ((rows.counts + 3).cumsum() - rows.counts - 3)[starts]
        windows.write(parts, connections.take(starts), [*firsts.tolist(), len(parts)])
        return _NO_ROWS

    def _parts(self, lengths: Objects, rows: _Rows) -> list[bytes]:
        """The pieces of rows in order: length, head, texts, tail of each. ``lengths``: by size."""
        heads, tails = self._heads.take(rows.handles), self._tails.take(rows.handles)
        count, texts = len(rows.handles), rows.texts
        recorded = self._records.rows(rows.handles)
        if recorded is not None:
            of = rows if len(recorded) == count else rows.take(recorded)
            tails[recorded] = self._records.advance(of.handles, of.texts, of.counts) + tails.take(recorded)
        parts = np.empty(3 * count + len(texts), np.object_)
        if rows.counts is None:
            parts[0::4], parts[1::4] = lengths.take(rows.sizes), heads
            parts[2::4], parts[3::4] = texts, tails
        else:
            ends = (rows.counts + 3).cumsum()
            starts = ends - rows.counts - 3
            parts[starts], parts[starts + 1], parts[ends - 1] = lengths.take(rows.sizes), heads, tails
            parts[np.arange(len(texts)) + np.repeat(3 * np.arange(count) + 2, rows.counts)] = texts
        pieces: list[bytes] = parts.tolist()
        return pieces

    def _write_others(self, frame: TokenFrame, texts: Objects, rows: NDArray[np.intp]) -> None:
        """Rows that are not written by columns."""
        streams, slow_path = self._streams, self._slow_path
        counts = frame.count
        ends = rows + 1 if counts is None else counts.cumsum().take(rows)
        starts = rows if counts is None else ends - counts.take(rows)
        finishes = repeat(0) if frame.finish is None else frame.finish.take(rows).tolist()
        hits: Iterable[int] = repeat(0)
        if frame.cached is not None:  # a resumed stream's count includes its own output
            hits = np.where(frame.position == 0, frame.cached, 0).take(rows).tolist()
        handles = frame.stream.take(rows)
        paths = self._path.take(handles).tolist()
        columns = (handles.tolist(), starts.tolist(), ends.tolist(), finishes, hits, paths)
        for handle, start, end, finish, hit, path in zip(*columns, strict=False):
            plain = path and not (finish or hit or start == end)
            stream = streams[handle]
            if stream is None:  # it ended with its reply, in a row before this one
                continue
            if self._guards and plain and self._guarded[handle]:
                plain = not self._unsafe.take(frame.tokens[start:end]).any()
            if path >= Path.CHUNK:
                self._records.update(handle)
            event = _event(stream, texts[start:end].tolist()) if plain else None
            if event is None or stream.write_targets is None:  # None: it was dropped in a row before this one
                logprobs = None if frame.logprobs is None else _entries(frame.logprobs, start, end)
                slow_path(stream, frame.tokens[start:end].tolist(), _FINISH[finish], hit, logprobs)
            else:
                try:
                    stream.write(event)
                except Exception:  # noqa: BLE001 - this stream ends, the others go on
                    self._on_fault(stream)
            if stream.record is not None and self._path[handle] >= Path.CHUNK and streams[handle] is stream:
                self._records.adopt_record(handle, stream.record)


class _Texts(NamedTuple):
    """The texts of a frame's tokens, row after row."""

    texts: Objects
    counts: I32 | None
    """Tokens per row; None: one."""
    width: int
    """The greatest of them."""

    def take(self, rows: NDArray[np.intp]) -> _Texts:
        """The texts of the rows at these indexes, in this order."""
        counts = self.counts
        if counts is None:
            return _Texts(self.texts.take(rows), None, 1)
        return _Texts(self.texts.take(token_order(counts, rows)), counts.take(rows), self.width)


class _Rows(NamedTuple):
    """Rows that are written by columns."""

    handles: I32
    sizes: NDArray[np.int64]
    """Bytes of each event, without framing."""
    targets: NDArray[np.int64]
    texts: Objects
    """Texts of the tokens, row after row."""
    counts: I32 | None
    """Tokens per row; None: one."""
    numbers: NDArray[np.intp]
    """Index of each row in its frame."""

    def take(self, rows: NDArray[np.intp]) -> _Rows:
        """The rows at these indexes, in this order."""
        counts = self.counts
        texts = self.texts.take(rows if counts is None else token_order(counts, rows))
        return _Rows(
            self.handles.take(rows),
            self.sizes.take(rows),
            self.targets.take(rows),
            texts,
            None if counts is None else counts.take(rows),
            self.numbers.take(rows),
        )


def _row_sizes(sizes: NDArray[np.int64], counts: I32) -> NDArray[np.int64]:
    """Bytes of the texts of each row; at least _NOT_DIRECT if it has no tokens. ``sizes``: of the tokens'
    texts."""
    ends = counts.cumsum()
    whole = np.concatenate(([0], sizes.cumsum()))
    summed: NDArray[np.int64] = whole.take(ends) - whole.take(ends - counts)
    summed[counts == 0] = _NOT_DIRECT
    return summed


def _event(stream: Stream, texts: list[Any]) -> bytes | None:
    """A row's texts as one event; None if the reply must make it."""
    try:
        return stream.event(b"".join(texts))
    except TypeError:  # None: a token whose text depends on others
        return None


def _entries(logprobs: Logprobs, start: int, end: int) -> Logprobs | None:
    """The entries of tokens ``start`` to ``end``, with token indexes relative to ``start``."""
    low, high = np.searchsorted(logprobs.token, (start, end))
    kept: NDArray[np.intp] = np.arange(low, high)
    return logprobs.select_entries(kept, logprobs.token[low:high] - np.int32(start))
