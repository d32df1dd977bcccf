"""Array types of the columns of token frames, and a test that takes little time for short ones."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

I8: TypeAlias = NDArray[np.int8]
I32: TypeAlias = NDArray[np.int32]
F32: TypeAlias = NDArray[np.float32]


def any_true(mask: NDArray[np.bool_]) -> bool:
    """``mask.any()`` in a fifth of the time for 64 values: a bool is a byte."""
    return b"\1" in mask.tobytes()


_UP = np.arange(8192, dtype=np.int32).tobytes()


def counts_up(column: I32) -> bool:
    """Whether the column is 0, 1, 2, …; cheaper than to compare arrays."""
    size = column.nbytes
    if size > len(_UP):
        return bool((column == np.arange(len(column))).all())
    return column.tobytes() == _UP[:size]
