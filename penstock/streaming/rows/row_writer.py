"""Turns a frame's tokens into events and writes them to the clients' connections: the last stop of a token.

A row whose tokens are plain text becomes one event: prepared head, text, prepared tail. On an HTTP/1.1
connection the event is a chunk, or a message of a WebSocket, and all of a frame are written together
(:mod:`penstock.streaming.rows.io_submit`). On an HTTP/2 connection it is a DATA frame, and all frames of a
connection are one write. Both are made by columns: a step of 1,024 rows creates no object per row. Other rows
take the slow path, the stream's reply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from itertools import repeat
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from penstock.http.http2.flow_windows import FlowWindows, first_rows
from penstock.http.websocket.messages import EVENT_END, message_of
from penstock.http.write_target import WriteTarget
from penstock.streaming.rows.field_columns import FieldColumns
from penstock.streaming.rows.http_framing import (
    FRAME_LENGTHS,
    MAX_CHUNK,
    MAX_EVENT,
    Objects,
    chunk_framing,
    frame_messages,
)
from penstock.streaming.rows.io_submit import BurstWriter
from penstock.streaming.rows.numbered_rows import MAX_FIELD, NumberedRows, sizes_of
from penstock.streaming.rows.row_columns import RowColumns
from penstock.streaming.rows.row_grid import RowGrid, RowTexts
from penstock.streaming.rows.token_fields import SpelledLogprobs, TokenFields
from penstock.streaming.rows.unchanged_batch import UnchangedBatch
from penstock.streaming.stream import Stream, StreamFields
from penstock.wire.arrays import I32
from penstock.wire.frames import WITH_TEXT, FinishReason, TokenFrame
from penstock.wire.logprobs import Logprobs
from penstock.wire.regroup import token_order

_FINISH = tuple(FinishReason)
"""Finish reasons by value; looking it up in the enumeration takes ten times as long."""
_ALL_TEXT = np.array([finish in WITH_TEXT for finish in FinishReason])
"""By finish reason: whether all tokens of the row are text."""
MIN_SPELLED = 4
"""Rows whose logprobs are spelled together in less time than one by one."""
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
    """As chunks, to an HTTP/1.1 socket, or as messages of a WebSocket."""
    FRAME = 3
    """As DATA frames, to an HTTP/2 connection."""


class HandleFlags:
    """A flag for each stream handle, and how many are set."""

    __slots__ = ("column", "count")

    def __init__(self) -> None:
        self.column = np.zeros(0, np.bool_)
        self.count = 0

    def grow(self, more: int) -> None:
        """There are so many more handles."""
        self.column = np.concatenate((self.column, np.zeros(more, np.bool_)))

    def set(self, handle: int, on: bool) -> None:
        """Set a handle's flag, or clear it."""
        if (on or self.count) and self.column[handle] != on:
            self.column[handle] = on
            self.count += 1 if on else -1


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
        self._texts = texts
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
        self._guarded = HandleFlags()
        """Streams whose rows are written by columns or by the sink, but for guarded tokens."""
        self._numbered = HandleFlags()
        """Streams whose rows are written by columns, and whose events have numbers."""
        self._messages = HandleFlags()
        """Streams whose rows are written by columns as messages of a WebSocket, in place of chunks."""
        self._fields = FieldColumns(texts)
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
        self._fields.grow(more)
        self._guarded.grow(more)
        self._numbered.grow(more)
        self._messages.grow(more)

    # -- the path of a stream

    def path(self, handle: int) -> Path:
        return Path(int(self._path[handle]))

    def choose(self, stream: Stream, write_target: WriteTarget | None, *, guarded: bool) -> None:
        """Write the stream's next plain rows by its ``write_target``; without one, by its ``write``."""
        handle = stream.handle
        self._changes += 1
        self._guarded.set(handle, guarded)
        self._numbered.set(handle, stream.record is not None and write_target is not None)
        messages = write_target is not None and write_target.messages
        self._messages.set(handle, messages)
        fields, head, tail = stream.fields, stream.head, stream.tail
        if fields is not None:
            tail = fields.layout.closing
            if self._path[handle] == Path.REPLY:
                self._fields.enter(handle, fields)
        if write_target is None:
            self._path[handle], self._sizes[handle] = Path.SINK, _NOT_DIRECT if fields is None else 0
            return
        if messages:
            head, tail = message_of(head), tail.removesuffix(EVENT_END)
        chunked = write_target.descriptor >= 0
        if write_target is not stream.write_target:
            stream.write_target = write_target
            if chunked:
                self._heads[handle], self._tails[handle] = head, tail if messages else tail + b"\r\n"
                self._targets[handle] = write_target.descriptor
            else:
                self._heads[handle], self._tails[handle] = write_target.prefix + head, tail
                self._targets[handle] = ~write_target.window
        self._path[handle] = Path.CHUNK if chunked else Path.FRAME
        self._sizes[handle] = len(head) + len(tail)

    def stop(self, handle: int) -> None:
        """Leave the stream's next rows to its reply."""
        if not self._path[handle]:
            return
        self._changes += 1
        self._guarded.set(handle, False)
        self._numbered.set(handle, False)
        self._messages.set(handle, False)
        if self._fields.count:
            stream = self._streams[handle]
            if stream is not None and stream.fields is not None:
                self._fields.leave(handle, stream.fields)
        self._path[handle], self._sizes[handle] = Path.REPLY, _NOT_DIRECT

    def close(self, handle: int) -> None:
        """The stream has ended."""
        self.stop(handle)
        self._heads[handle] = self._tails[handle] = None
        self._fields.close(handle)

    # -- rows

    def write(self, frame: TokenFrame, texts: Objects, unchanged: UnchangedBatch | None = None) -> None:
        """Write the rows of a frame, one per stream. ``texts``: of its tokens. ``unchanged``: what the frame
        continues."""
        handles, shown = frame.stream, RowTexts(texts, frame.count)
        if unchanged is not None and self._write_unchanged(frame, shown, unchanged):
            return
        sizes = self._sizes_of(frame)
        whole = sizes + self._sizes.take(handles)
        if frame.finish is not None:
            whole[frame.finish != 0] = _NOT_DIRECT
        if frame.cached is not None:
            whole[frame.cached != 0] = _NOT_DIRECT
        if self._numbered.count:
            whole[self._numbered.column.take(handles)] += MAX_FIELD
        direct, others = whole < MAX_EVENT, _NO_ROWS
        rows = np.flatnonzero(direct)
        if len(rows) < len(handles):
            others = np.flatnonzero(~direct)
        if len(rows):
            if len(rows) < len(handles):
                handles, sizes, shown = handles.take(rows), sizes.take(rows), shown.take(rows)
            if self._fields.count:
                refused = self._write_by_fields(frame, rows, sizes, shown)
            else:
                refused = self._write_direct(handles, sizes, shown, None)
            if len(refused):
                others = np.concatenate((others, rows.take(refused)))
        if len(others):
            self._write_others(frame, texts, others)

    def _sizes_of(self, frame: TokenFrame) -> NDArray[np.int64]:
        """Bytes of the text of each row; at least _NOT_DIRECT for those that the reply must see, and those
        without tokens."""
        sizes, counts = self._text_sizes.take(frame.tokens), frame.count
        if self._guarded.count:
            guarded = self._guarded.column.take(frame.stream)
            if counts is not None:
                guarded = guarded.repeat(counts)
            sizes[guarded & self._unsafe.take(frame.tokens)] = _NOT_DIRECT
        if counts is None:
            return sizes
        summed = np.add.reduceat(np.concatenate((sizes, [0])), counts.cumsum() - counts)
        summed[counts == 0] = _NOT_DIRECT
        return summed

    def _write_unchanged(self, frame: TokenFrame, texts: RowTexts, unchanged: UnchangedBatch) -> bool:
        """Write the rows of a frame whose streams all have the path CHUNK, or all the path FRAME, and the
        same fields, as in the frame before; False if they have not, and nothing is written."""
        handles = frame.stream
        if unchanged.columns_at != self._changes:
            unchanged.columns_at, unchanged.columns = self._changes, self._columns_of_all(handles)
        columns = unchanged.columns
        if columns is None:
            return False
        if columns.fields is None:
            sizes = self._sizes_of(frame)
        else:
            if self._guarded.count and int(self._sizes_of(frame).max()) >= _NOT_DIRECT:
                return False
            spelled = self._fields.spell(frame, columns.fields, handles, texts, None)
            if spelled is None:
                return False
            texts, sizes = spelled
        refused = self._write_columns(columns, sizes, texts)
        return refused is not None and not len(refused)

    def _columns_of_all(self, handles: I32) -> RowColumns | None:
        """The columns of streams, if all have the path CHUNK, or all the path FRAME, and the same fields."""
        paths = self._path.take(handles).tobytes()
        if paths[0] < Path.CHUNK or paths != paths[:1] * len(handles):
            return None
        alike, fields = self._fields.common(handles) if self._fields.count else (True, None)
        return self._columns(handles, fields) if alike else None

    def _write_by_fields(
        self, frame: TokenFrame, rows: NDArray[np.intp], sizes: NDArray[np.int64], texts: RowTexts
    ) -> NDArray[np.intp]:
        """:meth:`_write_direct` of streams with different fields, or without. ``rows``: indexes in the frame
        of the rows that ``sizes`` and ``texts`` are of."""
        handles = frame.stream if len(rows) == frame.rows else frame.stream.take(rows)
        alike, fields = self._fields.common(handles)
        if alike:
            return self._write_with_fields(frame, fields, rows, handles, sizes, texts)
        refused = []
        for each, own in self._fields.groups(handles):
            content = (rows.take(own), handles.take(own), sizes.take(own), texts.take(own))
            refused.append(own.take(self._write_with_fields(frame, each, *content)))
        return np.concatenate(refused)

    def _write_with_fields(
        self,
        frame: TokenFrame,
        fields: TokenFields | None,
        rows: NDArray[np.intp],
        handles: I32,
        sizes: NDArray[np.int64],
        texts: RowTexts,
    ) -> NDArray[np.intp]:
        """Write rows whose events have the same fields. ``rows``: their indexes in the frame. Returns those
        that their replies must write, by their place in ``rows``."""
        if fields is None:
            return self._write_direct(handles, sizes, texts, None)
        tokens = None
        if len(rows) < frame.rows:
            tokens = rows if frame.count is None else token_order(frame.count, rows)
        spelled = self._fields.spell(frame, fields, handles, texts, tokens)
        if spelled is None:
            return np.arange(len(handles))
        texts, sizes = spelled
        most = np.array([0, 0, MAX_CHUNK, MAX_EVENT]).take(self._path.take(handles))
        alone = sizes + self._sizes.take(handles) >= most
        rows = np.flatnonzero(~alone)
        if len(rows):
            content = (handles, sizes, texts)
            if len(rows) < len(handles):
                content = (handles.take(rows), sizes.take(rows), texts.take(rows))
            alone[rows.take(self._write_direct(*content, fields))] = True
        rows = np.flatnonzero(alone)
        if len(rows):
            self._write_alone(handles.take(rows), texts.take(rows), fields)
        return _NO_ROWS

    def _write_alone(self, handles: I32, texts: RowTexts, fields: TokenFields) -> None:
        """Write rows with fields one by one, by the streams' ``write``."""
        self._fields.advance(handles, texts)
        for handle, text in zip(handles.tolist(), texts.joined(), strict=True):
            stream = self._streams[handle]
            if stream is not None and stream.write_targets is not None:
                self._write_event(stream, stream.head + text + fields.closing)

    def _write_direct(
        self, handles: I32, sizes: NDArray[np.int64], texts: RowTexts, fields: TokenFields | None
    ) -> NDArray[np.intp]:
        """Write rows, as chunks or as frames. Returns those for which an HTTP/2 window has no room."""
        framed = self._targets.take(handles) < 0
        count = np.count_nonzero(framed)
        if not 0 < count < len(handles):
            return self._write_rows(handles, sizes, texts, fields)
        rows, chunks = np.flatnonzero(framed), np.flatnonzero(~framed)
        self._write_rows(handles.take(chunks), sizes.take(chunks), texts.take(chunks), fields)
        return rows.take(self._write_rows(handles.take(rows), sizes.take(rows), texts.take(rows), fields))

    def _write_rows(
        self, handles: I32, sizes: NDArray[np.int64], texts: RowTexts, fields: TokenFields | None
    ) -> NDArray[np.intp]:
        """:meth:`_write_direct` of rows that are all chunks, or all frames."""
        refused = self._write_columns(self._columns(handles, fields), sizes, texts)
        assert refused is not None, "each event is small enough"
        if 0 < len(refused) < len(handles):
            rows = np.delete(np.arange(len(handles)), refused)
            self._write_rows(handles.take(rows), sizes.take(rows), texts.take(rows), fields)
        return refused

    def _columns(self, handles: I32, fields: TokenFields | None) -> RowColumns:
        """The columns of streams with these fields that all have the path CHUNK, or all the path FRAME."""
        targets, order, starts, connections = self._targets.take(handles), None, _NO_ROWS, None
        if targets[0] < 0:
            targets = ~targets
            connections = self._windows.connection_of.take(targets)
            if self._windows.connection_count > 1:
                order = connections.argsort(kind="stable")
                handles, targets = handles.take(order), targets.take(order)
                connections = connections.take(order)
            starts = first_rows(connections)
            connections = connections.take(starts)
        grid = RowGrid(self._heads.take(handles), self._tails.take(handles), starts)
        numbered, messages = self._numbered_rows(handles), None
        if self._messages.count and connections is None:
            messages = np.flatnonzero(self._messages.column.take(handles))
        sizes = self._sizes.take(handles)
        return RowColumns(
            order, handles, sizes, targets, starts, connections, fields, grid, numbered, messages
        )

    def _numbered_rows(self, handles: I32) -> NumberedRows | None:
        """Which of the rows have numbers; None: there are none."""
        if not self._numbered.count:
            return None
        rows = np.flatnonzero(self._numbered.column.take(handles))
        numbered = handles.take(rows)
        streams = [self._streams[handle] for handle in numbered.tolist()]
        records = [stream.record for stream in streams if stream is not None and stream.record is not None]
        tails = self._tails.take(numbered).tolist()
        return NumberedRows(rows, records, tails, sizes_of(tails))

    def _write_columns(
        self, columns: RowColumns, sizes: NDArray[np.int64], texts: RowTexts
    ) -> NDArray[np.intp] | None:
        """Write rows, unless there are some for which an HTTP/2 window has no room: returns them, and nothing
        is written. None: some text depends on others, or an event is too large. ``sizes``: of the texts."""
        grid, numbered, framed = columns.grid, columns.numbered, columns.connections is not None
        if columns.order is not None:
            sizes, texts = sizes.take(columns.order), texts.take(columns.order)
        sizes = sizes + columns.sizes
        if numbered is not None:
            tails, added = numbered.numbered_tails()
            sizes[numbered.rows] += added
        try:
            if framed:
                headers = FRAME_LENGTHS.take(sizes)
            else:
                limit = MAX_EVENT if columns.fields is None else MAX_CHUNK
                headers, lengths = chunk_framing(sizes, limit)
                if columns.messages is not None:
                    frame_messages(headers, lengths, sizes, columns.messages)
        except IndexError:
            return None
        if framed and not self._windows.take_windows(columns.targets, sizes, columns.starts):
            refused = self._windows.without_room(columns.targets, sizes, columns.starts)
            return np.flatnonzero(refused) if columns.order is None else columns.order[refused]
        self._fields.advance(columns.handles, texts)
        grid.fill(headers, texts)
        if numbered is not None:
            grid.set_tails(numbered.rows, tails)
            numbered.add(texts.take(numbered.rows).joined())
        if columns.connections is not None:
            self._windows.write(grid.pieces(), columns.connections, grid.bounds)
        else:
            data = b"".join(grid.pieces())
            self._send_chunks(columns.handles, columns.targets, data, lengths)
        return _NO_ROWS

    def _send_chunks(
        self, handles: I32, descriptors: NDArray[np.int64], data: bytes, lengths: NDArray[np.int64]
    ) -> None:
        """Write a chunk to each stream's socket; what a socket does not take goes to its connection, as does
        everything after it."""
        for index, sent in self._burst(descriptors, data, lengths):
            stream = self._streams[handles[index]]
            assert stream is not None and stream.write_target is not None  # noqa: PT018
            self.choose(stream, None, guarded=bool(self._guarded.column[stream.handle]))
            end = int(lengths[: index + 1].sum())
            rest = data[end - int(lengths[index]) + sent : end]
            try:
                stream.write_target.write_rest(rest)
            except Exception:  # noqa: BLE001 - this stream ends, the others go on
                self._on_fault(stream)

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
        spelled = self._spell_logprobs(frame, texts, rows) if frame.logprobs is not None else {}
        paths = self._path.take(handles).tolist()
        columns = (handles.tolist(), starts.tolist(), ends.tolist(), finishes, hits, paths)
        for handle, start, end, finish, hit, path in zip(*columns, strict=False):
            plain = path and not (finish or hit or start == end)
            stream = streams[handle]
            if stream is None:  # it ended with its reply, in a row before this one
                continue
            if self._guarded.count and plain and self._guarded.column[handle]:
                plain = not self._unsafe.take(frame.tokens[start:end]).any()
            plain = plain and stream.fields is None
            event = _event(stream, texts[start:end].tolist()) if plain else None
            if event is None or stream.write_targets is None:  # None: it was dropped in a row before this one
                if path and stream.fields is not None:
                    self.stop(handle)  # the reply has the path chosen again
                logprobs = None if frame.logprobs is None else _entries(frame.logprobs, start, end)
                if logprobs is not None and handle in spelled:
                    parts = logprobs.token, logprobs.ids, logprobs.values, logprobs.rank
                    logprobs = SpelledLogprobs(*parts, *spelled[handle])
                own = frame.tokens[start:end]
                tokens = cast("Sequence[int]", own) if stream.reply.arrays else own.tolist()
                slow_path(stream, tokens, _FINISH[finish], hit, logprobs)
            else:
                self._write_event(stream, event)

    def _spell_logprobs(
        self, frame: TokenFrame, texts: Objects, rows: NDArray[np.intp]
    ) -> dict[int, tuple[bytes, int]]:
        """What events say of the logprobs of rows that replies get, if many begin or end at once: by handle,
        :attr:`SpelledLogprobs.field` and its characters."""
        text = self._sizes_of(frame).take(rows) < _NOT_DIRECT
        if frame.finish is not None:
            text &= _ALL_TEXT.take(frame.finish.take(rows))
        rows = rows[text]
        groups: dict[TokenFields, list[tuple[int, StreamFields]]] = {}
        for row, handle in zip(rows.tolist(), frame.stream.take(rows).tolist(), strict=True):
            stream = self._streams[handle]
            if stream is not None and stream.fields is not None:
                if self._path[handle] != Path.REPLY:
                    self.stop(handle)  # its places are counted there
                groups.setdefault(stream.fields.layout, []).append((row, stream.fields))
        found: dict[int, tuple[bytes, int]] = {}
        for members in groups.values():
            if len(members) >= MIN_SPELLED:
                own = np.array([row for row, _ in members])
                handles, shown = frame.stream.take(own), RowTexts(texts, frame.count).take(own)
                tokens = own if frame.count is None else token_order(frame.count, own)
                fields = [each for _, each in members]
                made = self._fields.spell_logprobs(frame, fields, handles, shown, tokens)
                found.update(zip(handles.tolist(), made, strict=False))
        return found

    def _write_event(self, stream: Stream, event: bytes) -> None:
        try:
            stream.write(event)
        except Exception:  # noqa: BLE001 - this stream ends, the others go on
            self._on_fault(stream)


def _event(stream: Stream, texts: list[Any]) -> bytes | None:
    """A row's texts as one event; None if the reply must make it."""
    try:
        return stream.event(b"".join(texts))
    except TypeError:  # None: a token whose text depends on others
        return None


def _entries(logprobs: Logprobs, start: int, end: int) -> Logprobs | None:
    """The entries of tokens ``start`` to ``end``, with token indexes relative to ``start``."""
    low, high = logprobs.token.searchsorted((start, end)).tolist()
    return logprobs.slice_entries(low, high, start)
