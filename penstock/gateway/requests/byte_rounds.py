"""Shares the event loop among large bodies, so that events of streams go between them."""

from __future__ import annotations

import asyncio
from collections import deque

BYTES_PER_ROUND = 256 << 10
"""Bytes of bodies that are worked on in one round of the event loop: as many as one read has, 0.5 ms."""


class ByteRounds:
    """The bodies that are read, or sent, by one event loop. They take turns."""

    def __init__(self) -> None:
        self._left = BYTES_PER_ROUND
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._scheduled = False

    async def spend(self, size: int) -> None:
        """``size`` bytes were worked on: wait for a round that has time for more."""
        self._left -= size
        loop = asyncio.get_running_loop()
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._begin, loop)
        if self._left <= 0 or self._waiting:
            turn = loop.create_future()
            self._waiting.append(turn)
            await turn

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """A round begins; the one that has waited longest goes on."""
        self._left = BYTES_PER_ROUND
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # who waited was not cancelled
                turn.set_result(None)
                break
        self._scheduled = bool(self._waiting)
        if self._scheduled:
            loop.call_soon(self._begin, loop)
