"""What receives replies in tests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from penstock.gateway.upstream.exchange import Failure, Headers

WAIT_S = 90.0


@dataclass
class Collected:
    """A receiver that remembers."""

    status: int = 0
    headers: Headers = field(default_factory=list)
    body: bytes = b""
    end: str | None = None
    failure: Failure | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def on_head(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers
        self.changed.set()

    def on_body(self, data: bytes, now: float) -> None:
        self.body += data
        self.changed.set()

    def on_end(self) -> None:
        self._set_end("end")

    def on_broken(self, reason: str, failure: Failure) -> None:
        self.failure = failure
        self._set_end(reason)

    def _set_end(self, end: str) -> None:
        assert self.end is None, "one end"
        self.end = end
        self.changed.set()

    async def until_end(self) -> str:
        async with asyncio.timeout(WAIT_S):
            while self.end is None:
                self.changed.clear()
                await self.changed.wait()
        return self.end
