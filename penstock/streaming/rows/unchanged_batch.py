"""Recognizes that a frame has the same streams as the one before, each with its next tokens.

So are most frames of up to some hundred streams. All that is checked and counted per row is then known for
the whole frame: a look at two or three columns replaces a dozen array operations, which cost an API server
that wakes up for each step far more than their work, since nothing of them is in the processor's caches.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.streaming.rows.row_columns import RowColumns
from penstock.wire.arrays import I32
from penstock.wire.frames import TokenFrame


class UnchangedBatch:
    """The rows of one engine's latest frame, which were checked, and of those that have continued them."""

    __slots__ = (
        "_ones",
        "_positions",
        "_step",
        "_streams",
        "columns",
        "columns_at",
        "frames",
        "latest",
        "left",
        "most",
        "now",
        "written",
    )

    def __init__(self, frame: TokenFrame, now: float, written: NDArray[np.bool_] | None, left: int) -> None:
        """``frame``: with tokens in every row, and nothing else (:func:`is_plain`). ``now``: when it came.
        ``written``: bool[R], its rows that become events, None: all; ``left``: tokens that each stream may
        have after it, at least."""
        self.latest = frame
        """The frame that came last."""
        self.most = _most(frame)
        """Tokens of its longest row."""
        self.now = now
        """Monotonic seconds when the latest frame came."""
        self.written = written
        self.left = left
        self.columns: RowColumns | None = None
        """Set by the row writer; None: rows have different paths."""
        self.columns_at = -1
        """The writer's number of changes when the columns were made."""
        self.frames = 0
        """Frames that have continued the first one and are not written down."""
        self._streams = frame.stream.tobytes()
        self._ones = int.from_bytes(b"\1\0\0\0" * frame.rows, "little")
        self._positions = _as_integer(frame.position)
        self._step = self._step_of(frame)

    def continue_with(self, frame: TokenFrame) -> bool:
        """Whether the frame continues these rows within the streams' limits; they include it then."""
        if not is_plain(frame) or frame.stream.tobytes() != self._streams:
            return False
        most, positions = _most(frame), _as_integer(frame.position)
        if most > self.left or positions - self._positions != self._step:
            return False
        self._positions, self._step = positions, self._step_of(frame)
        self.latest, self.most = frame, most
        self.frames += 1
        self.left -= most
        return True

    def _step_of(self, frame: TokenFrame) -> int:
        """By how much the positions of the frame that continues this one are greater."""
        return self._ones if frame.count is None else _as_integer(frame.count)


def is_plain(frame: TokenFrame) -> bool:
    """Whether the frame has tokens in every row, and nothing else but their logprobs."""
    return (
        frame.finish is None
        and frame.cached is None
        and frame.prompt is None
        and frame.kv_transfer_params is None
        and (frame.count is None or bool(np.count_nonzero(frame.count) == len(frame.count)))
    )


def _most(frame: TokenFrame) -> int:
    return 1 if frame.count is None else int(np.maximum.reduce(frame.count))


def _as_integer(column: I32) -> int:
    """The numbers as the digits of one number, to be compared at once. They are not negative, so the sum of
    two of them has no carry."""
    return int.from_bytes(column.tobytes(), "little")
