"""Histograms of rows, fed by whole columns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.metrics.histogram import Histogram
from penstock.wire.arrays import any_true
from penstock.wire.frames import TokenFrame


class RowMetrics(NamedTuple):
    """What is observed of all rows of an API server."""

    ttft: Histogram
    """Seconds from a request's arrival to a stream's first row."""
    itl: Histogram
    """Seconds between two rows of a stream."""
    event_tokens: Histogram
    """Tokens per row of streamed replies."""

    def record_latency(self, frame: TokenFrame, waits: NDArray[np.float64]) -> None:
        """``waits`` float64[R]: seconds since each stream's row before, or since its request's arrival."""
        first = frame.position == 0
        if frame.count is not None and np.count_nonzero(frame.count) < len(waits):  # ends without tokens
            made = frame.count > 0
            waits, first = waits[made], first[made]
        if any_true(first):
            self.ttft.observe(waits[first])
            waits = waits[~first]
        self.itl.observe(waits)

    def record_sizes(self, frame: TokenFrame, written: NDArray[np.bool_] | None) -> None:
        """``written`` bool[R]: the rows that become events; None: all, and each has tokens."""
        if frame.count is None:
            self.event_tokens.add(1.0, frame.rows if written is None else int(np.count_nonzero(written)))
        elif written is None:
            self.event_tokens.observe(frame.count)
        else:
            self.event_tokens.observe(frame.count[written & (frame.count > 0)])
