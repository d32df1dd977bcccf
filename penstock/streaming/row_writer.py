"""Turns a frame's tokens into events and writes them to the clients' connections: the last stop of a token.

A row whose tokens are plain text becomes one event: prepared head, text, prepared tail. On an HTTP/1.1
connection the event is a chunk, and all chunks of a frame are written together
(:mod:`penstock.streaming.io_submit`). On an HTTP/2 connection it is a DATA frame, and all frames of a
connection are one write. Both are made by columns: a step of 1,024 rows creates no object per row. Other rows
take the slow path, the stream's reply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.streaming.chunked import CHUNK_SIZES
from penstock.streaming.flow_windows import FlowWindows
from penstock.streaming.io_submit import BurstWriter
from penstock.streaming.row_path import RowPath
from penstock.streaming.stream import Stream
from penstock.wire.arrays import I32
from penstock.wire.frames import FinishReason, TokenFrame
from penstock.wire.logprobs import Logprobs
from penstock.wire.regroup import token_order

_MAX_EVENT = len(CHUNK_SIZES)
"""Larger events are written by the stream's sink."""
_FINISH = tuple(FinishReason)
"""By value; looking it up in the enumeration takes ten times as long."""
_NONE = FinishReason.NONE
_NO_TEXT = -1

Objects: TypeAlias = NDArray[np.object_]
SlowPath: TypeAlias = Callable[[Stream, Sequence[int], FinishReason, int, Logprobs | None], None]
"""Handles a row by its stream's reply: tokens, finish reason, cached prompt tokens, logprobs."""


def _objects(values: Sequence[bytes]) -> Objects:
    array = np.empty(len(values), np.object_)
    array[:] = values
    return array


_CHUNK_SIZES = _objects(CHUNK_SIZES)
_CHUNK_SIZE_LENGTHS = np.array([len(line) for line in CHUNK_SIZES], np.int64)
_FRAME_LENGTHS = _objects([size.to_bytes(3, "big") for size in range(_MAX_EVENT)])
"""Length fields of HTTP/2 frames (RFC 9113 §4.1), by payload size."""


class Path(IntEnum):
    """How a stream's plain rows are written."""

    REPLY = 0
    """Not plainly: the reply handles every row."""
    SINK = 1
    """One by one, by the stream's ``write``."""
    CHUNK = 2
    """As chunks, to an HTTP/1.1 socket."""
    FRAME = 3
    """As DATA frames, to an HTTP/2 connection."""


_SINK, _CHUNK, _FRAME = int(Path.SINK), int(Path.CHUNK), int(Path.FRAME)


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
    ) -> None:
        """``streams``: by handle. ``texts``: by token id, None if the text is not context-free. ``burst``
        writes to HTTP/1.1 sockets, ``windows`` are those of HTTP/2. ``on_fault`` is called when writing to
        one stream raises, with the exception at hand."""
        self._streams = streams
        self._burst = burst
        self._windows = windows
        self._slow_path = slow_path
        self._on_fault = on_fault
        self._text_sizes = np.array([_NO_TEXT if text is None else len(text) for text in texts], np.int64)
        self._path = np.zeros(0, np.int8)
        self._heads, self._tails = np.empty(0, np.object_), np.empty(0, np.object_)
        """What precedes and follows the text, framing included except for the size."""
        self._sizes = np.zeros(0, np.int64)
        """Bytes of an event besides its text, without framing."""
        self._targets = np.zeros(0, np.int64)
        """Descriptor of the socket, or slot in the windows."""
        self.grow(len(streams))

    def grow(self, capacity: int) -> None:
        """There are ``capacity`` handles now."""
        more = capacity - len(self._path)
        self._path = np.concatenate((self._path, np.zeros(more, np.int8)))
        self._heads = np.concatenate((self._heads, np.empty(more, np.object_)))
        self._tails = np.concatenate((self._tails, np.empty(more, np.object_)))
        self._sizes = np.concatenate((self._sizes, np.zeros(more, np.int64)))
        self._targets = np.concatenate((self._targets, np.zeros(more, np.int64)))

    # -- the path of a stream

    def path(self, handle: int) -> Path:
        return Path(int(self._path[handle]))

    def choose(self, stream: Stream, row_path: RowPath | None) -> None:
        """Write the stream's next plain rows by its ``row_path``; without one, by its ``write``."""
        handle = stream.handle
        if row_path is None:
            self._path[handle] = _SINK
            return
        if row_path is not stream.row_path:
            stream.row_path = row_path
            self._sizes[handle] = len(stream.head) + len(stream.tail)
            if row_path.descriptor >= 0:
                self._heads[handle], self._tails[handle] = stream.head, stream.tail + b"\r\n"
                self._targets[handle] = row_path.descriptor
            else:
                self._heads[handle], self._tails[handle] = row_path.prefix + stream.head, stream.tail
                self._targets[handle] = row_path.window
        self._path[handle] = _CHUNK if row_path.descriptor >= 0 else _FRAME

    def stop(self, handle: int) -> None:
        """Leave the stream's next rows to its reply."""
        self._path[handle] = 0

    def close(self, handle: int) -> None:
        """The stream has ended."""
        self._path[handle] = 0
        self._heads[handle] = self._tails[handle] = None

    # -- rows

    def write(self, frame: TokenFrame, texts: Objects) -> None:
        """Write the rows of a frame, one per stream. ``texts``: of its tokens."""
        handles, counts = frame.stream, frame.count
        sizes = self._text_sizes.take(frame.tokens)
        path = self._path.take(handles)
        direct = path >= _CHUNK
        if counts is None:
            direct &= sizes >= 0
        else:
            sizes, complete = _row_sizes(sizes, counts)
            direct &= complete
        if frame.finish is not None:
            direct &= frame.finish == 0
        if frame.cached is not None:
            direct &= frame.cached == 0
        sizes += self._sizes.take(handles)
        direct &= sizes < _MAX_EVENT
        limited = self._take_windows(handles, sizes, direct & (path == _FRAME))
        if limited is not None:
            direct &= ~limited
        rows = np.flatnonzero(direct)
        if len(rows) == len(handles):
            self._write_direct(handles, sizes, texts, counts, path)
            return
        if len(rows):
            of_rows = texts[rows if counts is None else token_order(counts, rows)]
            some = None if counts is None else counts[rows]
            self._write_direct(handles[rows], sizes[rows], of_rows, some, path[rows])
        self._write_others(frame, texts, np.flatnonzero(~direct).tolist())

    def _take_windows(
        self, handles: I32, sizes: NDArray[np.int64], framed: NDArray[np.bool_]
    ) -> NDArray[np.bool_] | None:
        """Take the bytes of the ``framed`` rows from the windows of their streams and connections.

        Returns bool[R]: the rows for which there is no room, of which nothing was taken; None: none.
        """
        count = np.count_nonzero(framed)
        if not count:
            return None
        whole = count == len(handles)
        slots = self._targets.take(handles) if whole else self._targets[handles[framed]]
        used = sizes if whole else sizes[framed]
        left = self._windows.streams.take(slots) - used
        connections = self._windows.connection_of.take(slots)
        totals = np.bincount(connections, used, minlength=len(self._windows.connections)).astype(np.int64)
        closed = totals > self._windows.connections
        refused = left < 0
        if closed.any():
            refused |= closed.take(connections)
        if refused.any():
            granted = ~refused
            slots, left, used, connections = (
                slots[granted],
                left[granted],
                used[granted],
                connections[granted],
            )
            totals = np.bincount(connections, used, minlength=len(totals)).astype(np.int64)
            limited = np.zeros(len(handles), np.bool_)
            limited[np.flatnonzero(framed)[refused]] = True
        else:
            limited = None
        self._windows.streams[slots] = left
        self._windows.connections -= totals
        return limited

    def _write_direct(
        self,
        handles: I32,
        sizes: NDArray[np.int64],
        texts: Objects,
        counts: I32 | None,
        path: NDArray[np.int8],
    ) -> None:
        framed = np.count_nonzero(path == _FRAME)
        if framed == 0:
            self._write_chunks(handles, sizes, texts, counts)
        elif framed == len(handles):
            self._write_frames(handles, sizes, texts, counts)
        else:
            for rows, write in (
                (np.flatnonzero(path == _CHUNK), self._write_chunks),
                (np.flatnonzero(path == _FRAME), self._write_frames),
            ):
                of_rows = texts[rows if counts is None else token_order(counts, rows)]
                write(handles[rows], sizes[rows], of_rows, None if counts is None else counts[rows])

    def _write_chunks(
        self, handles: I32, sizes: NDArray[np.int64], texts: Objects, counts: I32 | None
    ) -> None:
        """Write rows to HTTP/1.1 sockets; what a socket does not take goes to its connection, as does
        everything after it."""
        parts = self._parts(_CHUNK_SIZES.take(sizes), handles, texts, counts)
        data = b"".join(parts.tolist())
        lengths = sizes + _CHUNK_SIZE_LENGTHS.take(sizes) + 2
        for index, sent in self._burst(self._targets.take(handles), data, lengths):
            stream = self._streams[handles[index]]
            assert stream is not None and stream.row_path is not None  # noqa: PT018
            self.choose(stream, None)
            end = int(lengths[: index + 1].sum())
            rest = data[end - int(lengths[index]) + sent : end]
            try:
                stream.row_path.write_rest(rest)
            except Exception:  # noqa: BLE001 - this stream ends, the others go on
                self._on_fault(stream)

    def _write_frames(
        self, handles: I32, sizes: NDArray[np.int64], texts: Objects, counts: I32 | None
    ) -> None:
        """Write rows to HTTP/2 connections, each of which gets one write."""
        windows = self._windows
        connections = windows.connection_of.take(self._targets.take(handles))
        order = connections.argsort(kind="stable")
        ordered = connections.take(order)
        if ordered[0] != ordered[-1]:
            texts = texts.take(order if counts is None else token_order(counts, order))
            counts = None if counts is None else counts.take(order)
            handles, sizes = handles.take(order), sizes.take(order)
        parts = self._parts(_FRAME_LENGTHS.take(sizes), handles, texts, counts).tolist()
        starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        bounds = 4 * starts if counts is None else ((counts + 3).cumsum() - counts - 3)[starts]
        ends_at = [*bounds.tolist()[1:], len(parts)]
        for start, end, connection in zip(bounds.tolist(), ends_at, ordered[starts].tolist(), strict=True):
            writer = windows.writers[connection]
            assert writer is not None  # a stream of it is open
            writer.write_frames(b"".join(parts[start:end]))

    def _parts(self, lengths: Objects, handles: I32, texts: Objects, counts: I32 | None) -> Objects:
        """The pieces of rows in order: length, head, texts, tail of each."""
        rows = len(handles)
        heads, tails = self._heads.take(handles), self._tails.take(handles)
        parts = np.empty(3 * rows + len(texts), np.object_)
        if counts is None:
            parts[0::4], parts[1::4], parts[2::4], parts[3::4] = lengths, heads, texts, tails
            return parts
        ends = (counts + 3).cumsum()
        starts = ends - counts - 3
        parts[starts], parts[starts + 1], parts[ends - 1] = lengths, heads, tails
        parts[np.arange(len(texts)) + np.repeat(3 * np.arange(rows) + 2, counts)] = texts
        return parts

    def _write_others(self, frame: TokenFrame, texts: Objects, rows: list[int]) -> None:
        """Rows that are not written by columns."""
        ends = frame.counts().cumsum()
        for row in rows:
            stream = self._streams[frame.stream[row]]
            if stream is None:  # it ended with its reply, in a row before this one
                continue
            end = int(ends[row])
            start = end - (1 if frame.count is None else int(frame.count[row]))
            event = None
            if self._path[stream.handle] >= _SINK and not _has_more_than_text(frame, row):
                event = _event(stream, texts[start:end].tolist())
            if event is None:
                self._slow_path_row(frame, row, stream, start, end)
                continue
            try:
                stream.write(event)
            except Exception:  # noqa: BLE001 - this stream ends, the others go on
                self._on_fault(stream)

    def _slow_path_row(self, frame: TokenFrame, row: int, stream: Stream, start: int, end: int) -> None:
        finish = _NONE if frame.finish is None else _FINISH[frame.finish[row]]
        cached = 0
        if frame.cached is not None and not frame.position[row]:
            cached = int(frame.cached[row])  # a resumed stream's count includes its own output
        logprobs = None if frame.logprobs is None else _entries(frame.logprobs, start, end)
        self._slow_path(stream, frame.tokens[start:end].tolist(), finish, cached, logprobs)


def _row_sizes(sizes: NDArray[np.int64], counts: I32) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Bytes of the texts of each row, and whether it has tokens, all of them with a text. ``sizes``: of the
    tokens' texts."""
    rows = np.repeat(np.arange(len(counts)), counts)
    complete = counts > 0
    complete[rows[sizes < 0]] = False
    return np.bincount(rows, sizes, minlength=len(counts)).astype(np.int64), complete


def _has_more_than_text(frame: TokenFrame, row: int) -> bool:
    return bool(
        (frame.finish is not None and frame.finish[row])
        or (frame.cached is not None and frame.cached[row])
        or (frame.count is not None and not frame.count[row])
    )


def _event(stream: Stream, texts: list[Any]) -> bytes | None:
    """A row's texts as one event; None if the reply must make it."""
    try:
        return b"".join((stream.head, *texts, stream.tail))
    except TypeError:  # None: a token whose text depends on others
        return None


def _entries(logprobs: Logprobs, start: int, end: int) -> Logprobs | None:
    """The entries of tokens ``start`` to ``end``, with token indexes relative to ``start``."""
    low, high = np.searchsorted(logprobs.token, (start, end))
    kept: NDArray[np.intp] = np.arange(low, high)
    return logprobs.take(kept, logprobs.token[low:high] - np.int32(start))
