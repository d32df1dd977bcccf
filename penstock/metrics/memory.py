"""Returns the C library's free memory to the system after a peak, once the process is idle."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

MANY_CONNECTIONS = 512
"""Ended connections, or streams of an engine, that are worth a release: 9,000 connections, each with a
stream, left 36 MiB of free memory."""


def release_free_memory() -> None:
    """Return free memory to the system. Does nothing unless the C library has malloc_trim(3), as glibc."""
    library = ctypes.CDLL(None)
    try:
        trim = library.malloc_trim
    except AttributeError:
        return
    trim(0)


class Trimmer:
    """Watches the number of connections or streams; calls ``release`` when many have ended and the process is
    idle."""

    def __init__(self, release: Callable[[], None] = release_free_memory) -> None:
        self._release = release
        self._most = 0

    def watch(self, connections: int, *, idle: bool) -> None:
        """Report the open connections; ``idle``: the process has nothing to do."""
        self._most = max(self._most, connections)
        if idle and self._most - connections >= MANY_CONNECTIONS:
            self._most = connections
            self._release()
