"""Turns in which long replies share the event loop with the events of streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

TURN_S = 0.002
"""Time to make pieces before other work runs."""


class Turns:
    """The long replies of one process: one of them has a turn in each round of the event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def next(self, pieces: Iterator[bytes]) -> tuple[bytearray, bool]:
        """The next pieces, joined, and whether they were the last. Each takes less than a turn to make."""
        async with self._lock:
            made = next_turn(pieces)
            await asyncio.sleep(0)
        return made

    async def one(self, pieces: Iterator[bytes]) -> bytes | None:
        """The next piece; None after the last one."""
        async with self._lock:
            piece = next(pieces, None)
            await asyncio.sleep(0)
        return piece

    async def joined(self, pieces: Iterator[bytes]) -> bytes:
        """All pieces."""
        body, ended = bytearray(), False
        while not ended:
            more, ended = await self.next(pieces)
            body += more
        return bytes(body)


def next_turn(pieces: Iterator[bytes]) -> tuple[bytearray, bool]:
    """As many pieces as there is time for, and whether they were the last."""
    made = bytearray()
    due = time.monotonic() + TURN_S
    for piece in pieces:
        made += piece
        if time.monotonic() >= due:
            return made, False
    return made, True
