"""Memory that the C library keeps after a peak is given back to the system once nothing runs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

MANY_CONNECTIONS = 512
"""Fewer do not leave enough behind to look for it: 9,000, each with a stream, left 36 MiB."""


def release_free_memory() -> None:
    """What the C library has free, except where it cannot be asked to (glibc alone has malloc_trim(3))."""
    library = ctypes.CDLL(None)
    try:
        trim = library.malloc_trim
    except AttributeError:
        return
    trim(0)


class Trimmer:
    """Told from time to time how many connections there are; calls ``release`` when many have ended and
    nothing runs."""

    def __init__(self, release: Callable[[], None] = release_free_memory) -> None:
        self._release = release
        self._most = 0

    def watch(self, connections: int, *, idle: bool) -> None:
        """So many are open; ``idle``: nothing waits for this process."""
        self._most = max(self._most, connections)
        if idle and self._most - connections >= MANY_CONNECTIONS:
            self._most = connections
            self._release()
