"""Limits the bytes of large requests that threads work on at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

Result = TypeVar("Result")


class ByteBudget:
    """A number of bytes that work in threads takes for its time, in the order in which it comes."""

    def __init__(self, size: int) -> None:
        self._size = self._free = size
        self._order = asyncio.Lock()
        self._freed = asyncio.Event()

    async def run_in_thread(self, size: int, work: Callable[..., Result], *arguments: object) -> Result:
        """The result of ``work``, which begins when ``size`` bytes are free; more than there are wait for
        all. If this is cancelled, they stay taken until the thread has ended."""
        size = min(size, self._size)
        async with self._order:
            while self._free < size:
                self._freed.clear()
                await self._freed.wait()
            self._free -= size
        running = asyncio.get_running_loop().run_in_executor(None, partial(work, *arguments))
        running.add_done_callback(partial(self._release, size))
        try:
            return await asyncio.shield(running)
        finally:
            del running  # it has the error that refers to this frame

    def _release(self, size: int, ended: asyncio.Future[Result]) -> None:
        self._free += size
        self._freed.set()
        if not ended.cancelled():
            ended.exception()  # asyncio logs those that nobody asks for
