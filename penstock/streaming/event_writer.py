"""Turns a frame's tokens into events and writes them to the clients' sockets: the last stop of a token.

A row whose tokens are plain text becomes one chunk: prepared head, text, prepared tail. All chunks of a
frame are written together (:mod:`penstock.streaming.io_submit`). Other rows take the slow path, the stream's
reply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.streaming.chunked import CHUNK_SIZES
from penstock.streaming.io_submit import BurstWriter
from penstock.streaming.stream import Stream
from penstock.wire.frames import FinishReason, TokenFrame
from penstock.wire.logprobs import Logprobs

_MAX_EVENT = len(CHUNK_SIZES)
_FINISH = tuple(FinishReason)
"""By value; looking it up in the enumeration takes ten times as long."""
_NONE = FinishReason.NONE

SlowPath: TypeAlias = Callable[[Stream, Sequence[int], FinishReason, int, Logprobs | None], None]
"""Handles a row by its stream's reply: tokens, finish reason, cached prompt tokens, logprobs."""


class EventWriter:
    """Writes the rows of frames, for the streams of one output processor."""

    def __init__(
        self,
        streams: Sequence[Stream | None],
        burst: BurstWriter,
        slow_path: SlowPath,
        on_fault: Callable[[Stream], None],
    ) -> None:
        """``streams``: by handle; the list may grow. ``burst`` writes to the sockets of streams that have a
        descriptor. ``on_fault`` is called when a stream's ``write`` raises, with the exception at hand."""
        self._streams = streams
        self._burst = burst
        self._slow_path = slow_path
        self._on_fault = on_fault

    def write_single_token_rows(
        self, handles: list[int], tokens: list[int], texts: list[bytes | None]
    ) -> None:
        """The hot loop of the token path: allocates no object per row that the garbage collector tracks."""
        streams, sizes, join = self._streams, CHUNK_SIZES, b"".join
        direct: list[Stream] = []
        chunks: list[bytes] = []
        for handle, token, text in zip(handles, tokens, texts, strict=True):
            stream = streams[handle]
            assert stream is not None  # its rank was checked
            if text is not None and stream.fast_path:
                chunk = join((sizes[stream.framing_bytes + len(text)], stream.head, text, stream.tail))
                if stream.descriptor < 0:
                    try:
                        stream.write(chunk)
                    except Exception:  # noqa: BLE001 - this stream ends, the others go on
                        self._on_fault(stream)
                else:
                    direct.append(stream)
                    chunks.append(chunk)
            else:
                self._slow_path(stream, (token,), _NONE, 0, None)
        self._write(direct, chunks)

    def write_rows(self, frame: TokenFrame, handles: list[int], texts: list[bytes | None]) -> None:
        """Rows of any number of tokens, with finish reasons, cached counts and logprobs."""
        direct: list[Stream] = []
        chunks: list[bytes] = []
        ends = frame.counts().cumsum().tolist()
        start = 0
        for row, (handle, end, slow) in enumerate(zip(handles, ends, _slow_path_mask(frame), strict=True)):
            stream = self._streams[handle]
            assert stream is not None  # its rank was checked
            chunk = _chunk(stream, texts[start:end]) if stream.fast_path and not slow else None
            if chunk is None:
                self._slow_path_row(frame, row, stream, start, end)
            elif stream.descriptor < 0:
                try:
                    stream.write(chunk)
                except Exception:  # noqa: BLE001 - this stream ends, the others go on
                    self._on_fault(stream)
            else:
                direct.append(stream)
                chunks.append(chunk)
            start = end
        self._write(direct, chunks)

    def _write(self, streams: list[Stream], chunks: list[bytes]) -> None:
        """Writes to the streams' sockets; what a socket does not take goes to the stream's ``write``, as does
        everything after it."""
        for index, sent in self._burst([stream.descriptor for stream in streams], chunks):
            stream = streams[index]
            stream.bypass(-1)
            try:
                stream.write(chunks[index][sent:])
            except Exception:  # noqa: BLE001 - this stream ends, the others go on
                self._on_fault(stream)

    def _slow_path_row(self, frame: TokenFrame, row: int, stream: Stream, start: int, end: int) -> None:
        finish = _NONE if frame.finish is None else _FINISH[frame.finish[row]]
        cached = 0
        if frame.cached is not None and not frame.position[row]:
            cached = int(frame.cached[row])  # a resumed stream's count includes its own output
        logprobs = None if frame.logprobs is None else _entries(frame.logprobs, start, end)
        self._slow_path(stream, frame.tokens[start:end].tolist(), finish, cached, logprobs)


def _chunk(stream: Stream, texts: Sequence[bytes | None]) -> bytes | None:
    """A row's texts as one event; None if the reply must make it."""
    try:
        text = b"".join(texts)  # type: ignore[arg-type]
    except TypeError:  # None: a token whose text depends on others
        return None
    size = stream.framing_bytes + len(text)
    return b"".join((CHUNK_SIZES[size], stream.head, text, stream.tail)) if size < _MAX_EVENT else None


def _slow_path_mask(frame: TokenFrame) -> list[bool]:
    """Per row, whether it has a finish reason, a cached count, or no tokens."""
    slow = np.zeros(frame.rows, np.bool_) if frame.finish is None else frame.finish != 0
    if frame.cached is not None:
        slow |= frame.cached != 0
    if frame.count is not None:
        slow |= frame.count == 0
    return slow.tolist()


def _entries(logprobs: Logprobs, start: int, end: int) -> Logprobs | None:
    """The entries of tokens ``start`` to ``end``, with token indexes relative to ``start``."""
    low, high = np.searchsorted(logprobs.token, (start, end))
    kept: NDArray[np.intp] = np.arange(low, high)
    return logprobs.take(kept, logprobs.token[low:high] - np.int32(start))
