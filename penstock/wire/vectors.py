"""The vectors of a frame's rows: one float32 buffer for all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.wire.arrays import F32, I32


@dataclass(slots=True, frozen=True, eq=False)
class Vectors:
    """What has been made of inputs. A row of a frame is some consecutive inputs of its stream: ``position``
    is the index of the first one, ``count`` their number, and ``tokens`` says how many vectors each has: one,
    or with a vector per token as many as tokens."""

    width: I32
    """int32[R]: values of each vector of the row."""
    values: F32
    """float32[V]: the vectors of all rows, row after row."""

    def sizes(self, tokens: I32, count: I32) -> NDArray[np.int64]:
        """int64[R]: values of each row. ``tokens`` and ``count``: the frame's."""
        ends = np.cumsum(tokens, dtype=np.int64)
        last = np.cumsum(count, dtype=np.int64)
        sums = np.concatenate((np.zeros(1, np.int64), ends))
        found: NDArray[np.int64] = (sums[last] - sums[last - count]) * self.width
        return found


def take_vectors(vectors: Vectors, tokens: I32, count: I32, rows: NDArray[np.intp]) -> Vectors:
    """Those of ``rows``, in that order. ``tokens`` and ``count``: of the frame from which they are taken."""
    sizes = vectors.sizes(tokens, count)
    ends = np.cumsum(sizes)
    parts = [vectors.values[ends[row] - sizes[row] : ends[row]] for row in rows.tolist()]
    return Vectors(vectors.width[rows], np.concatenate(parts) if parts else vectors.values[:0])
