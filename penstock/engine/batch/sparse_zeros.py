"""Arrays of zeros of which little is used: memory is committed where they are written, in small pages."""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_SMALL_PAGES: int | None = getattr(mmap, "MADV_NOHUGEPAGE", None)  # Linux has it
_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)  # of Linux; Python names it in later versions


def sparse_zeros(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """``np.zeros`` without the huge pages that numpy asks for. With them the first entry of each row of a
    wide table commits 2 MiB, and a thousand streams that begin together wait until 2 GiB are cleared."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < mmap.PAGESIZE or _SMALL_PAGES is None:
        return np.zeros(shape, dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(_SMALL_PAGES)
    return np.frombuffer(memory, dtype).reshape(shape)
