"""The text of ``/metrics``, made once for all requests that wait for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

MIN_INTERVAL_S = 0.05
"""Between two texts: each takes some milliseconds of the event loop, and clients may ask in a flood."""
SLICE_S = 0.005
"""Time after which the event loop has a turn."""
T = TypeVar("T")


async def in_slices(
    made: Iterable[T], clock: Callable[[], float] = time.monotonic, slice_s: float = SLICE_S
) -> list[T]:
    """All that ``made`` makes; between two of them others have a turn when a slice is over."""
    found, until = [], clock() + slice_s
    for each in made:
        found.append(each)
        if clock() >= until:
            await asyncio.sleep(0)
            until = clock() + slice_s
    return found


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
