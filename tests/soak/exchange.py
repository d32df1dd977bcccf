"""A request that a client of a soak has sent, and how the client behaves until its end."""

from __future__ import annotations

import asyncio
import contextlib
import time

from tests.soak.received_reply import ReceivedReply
from tests.soak.request_mix import ClientBehaviour, RequestSpec

SMALL_WINDOW = 4096
"""Receive buffer of a client that reads slowly, in bytes."""
SLOW_READ_INTERVAL_S = 0.3
"""Time between its reads."""


class SentRequest:
    """A request on a connection: what was received, and how it ended."""

    def __init__(self, port: int, opened_at: float, *, reused: bool) -> None:
        """``reused``: the server may have closed the connection before. False over HTTP/2, where it says
        what it has not begun."""
        self.seen = ReceivedReply()
        self.port = port
        """The client's port, which identifies the API server that served it. Ports are reused over time."""
        self.opened_at = opened_at
        """time.monotonic() before the connection was opened. Its server may be killed before this process
        continues."""
        self.reused = reused
        self.left = False
        """The client closed the connection, or reset the stream."""
        self.stuck = False
        """It did not finish in time."""
        self.ended_at = 0.0
        """time.monotonic()"""

    @property
    def stale(self) -> bool:
        """The server had closed the connection before it got the request. Clients retry."""
        nothing = not self.seen.status and not self.left and not self.seen.whole
        return nothing and (self.reused or self.seen.refused)


class Exchange:
    """One request in flight: on a connection of its own, or as a stream."""

    def __init__(self) -> None:
        self.open = False
        """Whether more can come."""
        self.changed = asyncio.Event()
        """Set when something has come."""

    def stop_reading(self) -> None:
        raise NotImplementedError

    def read_again(self) -> None:
        raise NotImplementedError

    async def until_end(self, attempt: SentRequest, spec: RequestSpec, seconds: float) -> None:
        """Behaves as ``spec`` says until the request, the connection or the time limit ends."""
        try:
            async with asyncio.timeout(seconds):
                await self._behave(spec, attempt.seen)
        except TimeoutError:
            attempt.stuck = True
        attempt.ended_at = time.monotonic()
        attempt.left = self.open and not attempt.seen.whole and not attempt.stuck

    async def _behave(self, spec: RequestSpec, seen: ReceivedReply) -> None:
        match spec.behaviour:
            case ClientBehaviour.LEAVE_EARLY:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(spec.wait_s):
                        await self._until_whole(seen)
            case ClientBehaviour.LEAVE_LATE:
                while self.open and not seen.whole and seen.events < spec.events:
                    await self._wait()
            case ClientBehaviour.STALL:
                self.stop_reading()
                await asyncio.sleep(spec.wait_s)
                self.read_again()
                await self._until_whole(seen)
            case _:
                await self._until_whole(seen)

    async def _until_whole(self, seen: ReceivedReply) -> None:
        while self.open and not seen.whole:
            await self._wait()

    async def _wait(self) -> None:
        self.changed.clear()
        await self.changed.wait()
