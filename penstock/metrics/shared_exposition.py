"""The text of ``/metrics``, made once for all requests that wait for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

MIN_INTERVAL_S = 0.05
"""Between two texts: each takes some milliseconds of the event loop, and clients may ask in a flood."""


class SharedExposition:
    """Makes texts one after the other. A request gets one that was begun after the request came."""

    def __init__(self, make: Callable[[], Awaitable[bytes]]) -> None:
        self._make = make
        self._one_at_a_time = asyncio.Lock()
        self._next: asyncio.Task[bytes] | None = None
        """The text that has not been begun."""
        self._begun_at = -MIN_INTERVAL_S

    async def get(self) -> bytes:
        """A new text. Raises what ``make`` raises."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._run())
        return await asyncio.shield(self._next)

    async def _run(self) -> bytes:
        async with self._one_at_a_time:
            await asyncio.sleep(max(0.0, self._begun_at + MIN_INTERVAL_S - time.monotonic()))
            self._next, self._begun_at = None, time.monotonic()
            return await self._make()
