"""So many pictures at a time, and tenants by turns: whoever sends a thousand delays their own."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TenantTurns:
    """``places``: turns at the same time. Use it on one event loop."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By tenant, the next one first; each in the order of their coming."""

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a turn, and have it inside the context. One that is cancelled before has none."""
        if self._free:
            self._free -= 1
        else:
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(tenant, deque()).append(mine)
            try:
                await mine
            except asyncio.CancelledError:
                if not mine.cancelled():
                    self._pass_on()
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            tenant, queue = self._waiting.popitem(last=False)
            while queue:
                following = queue.popleft()
                if following.done():
                    continue
                if queue:
                    self._waiting[tenant] = queue
                following.set_result(None)
                return
        self._free += 1
