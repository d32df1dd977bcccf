"""Recognizes that a frame has the same streams as the one before, each with its next token.

So are most frames of up to some hundred streams. All that is checked and counted per row is then known for
the whole frame: a look at two columns replaces a dozen array operations, which cost an API server that wakes
up for each step far more than their work, since nothing of them is in the processor's caches.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.wire.arrays import I32
from penstock.wire.frames import TokenFrame


class RecordedColumns(NamedTuple):
    """Those of the rows whose events are numbered and collected."""

    rows: NDArray[np.intp]
    """Their indexes."""
    handles: I32
    tails: NDArray[np.object_]
    """What follows the number."""


class ChunkColumns(NamedTuple):
    """What the row writer needs of streams whose rows are chunks, in the order of their rows."""

    sizes: NDArray[np.int64]
    """Bytes of an event besides its text, without framing."""
    targets: NDArray[np.int64]
    """Descriptors."""
    parts: NDArray[np.object_]
    """Size line, head, text and tail of each row: heads and tails are there."""
    recorded: RecordedColumns | None


class FrameColumns(NamedTuple):
    """What the row writer needs of streams whose rows are frames, in the order of their connections."""

    order: NDArray[np.intp] | None
    """Indexes that sort rows by connection; None: they are sorted."""
    sizes: NDArray[np.int64]
    """Bytes of an event besides its text, without framing."""
    slots: NDArray[np.int64]
    """Of the streams' windows."""
    starts: NDArray[np.intp]
    """Index of each connection's first row."""
    connections: NDArray[np.uint16]
    parts: NDArray[np.object_]
    """Length, head, text and tail of each row: heads and tails are there."""
    bounds: list[int]
    """Index of each connection's first part, and the number of parts."""
    recorded: RecordedColumns | None


class SteadyRows:
    """The rows of one engine's latest frame, which were checked, and of those that have continued them."""

    __slots__ = (
        "_positions",
        "_step",
        "_streams",
        "columns",
        "columns_at",
        "frames",
        "handles",
        "left",
        "now",
        "written",
    )

    def __init__(self, frame: TokenFrame, now: float, written: int, left: int) -> None:
        """``frame``: with one token per row, and nothing else (:func:`is_plain`). ``now``: when it came.
        ``written``: its rows that become events; ``left``: frames until a stream reaches its limit."""
        self.handles = frame.stream
        """int32[R]"""
        self.now = now
        """When the latest frame came."""
        self.written = written
        self.left = left
        self.columns: ChunkColumns | FrameColumns | None = None
        """Set by the row writer; None: rows have different paths."""
        self.columns_at = -1
        """The writer's number of changes when the columns were made."""
        self.frames = 0
        """Frames that have continued the first one and are not written down."""
        self._streams = frame.stream.tobytes()
        self._positions = _as_integer(frame)
        self._step = int.from_bytes(b"\1\0\0\0" * frame.rows, "little")

    def take(self, frame: TokenFrame) -> bool:
        """Whether the frame continues these rows within the streams' limits; they include it then."""
        if self.left <= 0 or not is_plain(frame) or frame.stream.tobytes() != self._streams:
            return False
        positions = _as_integer(frame)
        if positions - self._positions != self._step:
            return False
        self._positions = positions
        self.frames += 1
        self.left -= 1
        return True


def is_plain(frame: TokenFrame) -> bool:
    """Whether the frame has one token per row, and nothing else."""
    return (
        frame.count is None
        and frame.finish is None
        and frame.cached is None
        and frame.logprobs is None
        and frame.prompt is None
        and frame.kv_transfer_params is None
    )


def _as_integer(frame: TokenFrame) -> int:
    """The positions as the digits of one number, to be compared at once. They are not negative, so a
    difference of 1 in every digit has no carry."""
    return int.from_bytes(frame.position.tobytes(), "little")
