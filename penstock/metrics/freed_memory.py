"""What the C library does with freed memory."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
"""glibc's upper limit."""
LARGEST_TRIM_THRESHOLD = 2**31 - 1


def keep_freed_memory(most: int = LARGEST_TRIM_THRESHOLD) -> None:
    """Make the C library keep up to ``most`` freed bytes at the end of its memory for later use.

    By default glibc returns blocks of some hundred kilobytes to the kernel, which zeroes their pages again at
    each page fault: a microsecond or more for 4 KiB. Does nothing with another C library.
    """
    library = ctypes.CDLL(None)
    try:
        mallopt = library.mallopt
    except AttributeError:
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    mallopt(_M_TRIM_THRESHOLD, most)
