"""Limits the bytes of large requests that threads work on at the same time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class ByteBudget:
    """A number of bytes that requests reserve for a while, in the order in which they come."""

    def __init__(self, size: int) -> None:
        self._size = self._free = size
        self._order = asyncio.Lock()
        self._freed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def reserve(self, size: int) -> AsyncIterator[None]:
        """Wait until ``size`` bytes are free and hold them; more than there are wait for all."""
        size = min(size, self._size)
        async with self._order:
            while self._free < size:
                self._freed.clear()
                await self._freed.wait()
            self._free -= size
        try:
            yield
        finally:
            self._free += size
            self._freed.set()
