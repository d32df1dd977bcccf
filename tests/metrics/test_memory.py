"""Free memory is given back when nothing runs after much did."""

from __future__ import annotations

import ctypes
import sys

import pytest

from penstock.metrics.memory import MANY_CONNECTIONS, Trimmer, release_free_memory


def test_once_many_connections_have_ended() -> None:
    released: list[int] = []
    trimmer = Trimmer(lambda: released.append(connections))
    for connections, idle in (
        (10, True),
        (MANY_CONNECTIONS + 5, True),
        (6, True),
        (5, False),
        (5, True),
        (0, True),
        (MANY_CONNECTIONS - 1, True),
        (0, True),
        (MANY_CONNECTIONS + 90, False),
        (90, True),
    ):
        trimmer.watch(connections, idle=idle)
    assert released == [5, 90]


@pytest.mark.skipif(sys.platform != "linux", reason="the C library elsewhere has no malloc_trim")
def test_what_is_free_goes_back_to_the_system() -> None:
    """Blocks that were freed below one that is kept stay resident until they are trimmed."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim"):
        pytest.skip("a C library without malloc_trim")
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    blocks = [library.malloc(32 * 1024) for _ in range(1024)]
    for block in blocks:
        ctypes.memset(block, 1, 32 * 1024)
    last = library.malloc(32 * 1024)
    for block in blocks:
        library.free(block)
    before = resident()
    release_free_memory()
    assert resident() < before - 16 * 2**20
    library.free(last)


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
