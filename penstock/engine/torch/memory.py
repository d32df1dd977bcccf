"""What the C library does with memory that a step frees."""

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
"""glibc refuses more."""


def keep_freed_memory() -> None:
    """Let the C library keep what a step frees for the next step, which needs as much.

    By default it gives tensors of some megabytes back to the kernel, which zeroes their pages again one page
    fault at a time: 1,700 faults a step at 1,024 rows of a small model, up to half of the engine's CPU time.
    Does nothing with a C library other than glibc.
    """
    library = ctypes.CDLL(None)
    try:
        mallopt = library.mallopt
    except AttributeError:
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
