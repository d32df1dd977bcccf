"""Asks engines for their metrics of this moment, and waits for the answers, but not for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

ANSWER_TIMEOUT_S = 0.5
"""How long one :meth:`MetricsQueries.ask` waits. Engines answer after the step that they are in."""


class MetricsQueries:
    """The queries of one API server.

    An engine that has not answered in time is not asked again, nor waited for, before it has: one that hangs
    delays one scrape, not each.
    """

    def __init__(self, send: Callable[[int, int], None], timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """``send`` sends the query of a number to an engine, by rank, that is connected."""
        self._send = send
        self._timeout_s = timeout_s
        self._number = 0
        self._open: dict[tuple[int, int], asyncio.Future[None]] = {}
        """Open queries by rank and number."""
        self._late: dict[int, int] = {}
        """Engines that have not answered in time, and the number of that query."""

    async def ask(self, ranks: Iterable[int]) -> None:
        """Return once the engines of ``ranks`` have answered, or are late."""
        self._number += 1
        number, loop = self._number, asyncio.get_running_loop()
        asked = {rank: loop.create_future() for rank in ranks if rank not in self._late}
        if not asked:
            return
        for rank, future in asked.items():
            self._open[rank, number] = future
            self._send(rank, number)
        try:
            await asyncio.wait(asked.values(), timeout=self._timeout_s)
        finally:
            for rank, future in asked.items():
                del self._open[rank, number]
                if not future.done():
                    self._late[rank] = number

    def on_answer(self, rank: int, number: int) -> None:
        """An engine has answered, and all its earlier queries with this one."""
        if self._late.get(rank, number + 1) <= number:
            del self._late[rank]
        for (asked, query), future in self._open.items():
            if asked == rank and query <= number and not future.done():
                future.set_result(None)

    def on_disconnected(self, rank: int) -> None:
        """The connection to an engine broke: it answers no query."""
        self._late.pop(rank, None)
        for (asked, _), future in self._open.items():
            if asked == rank and not future.done():
                future.set_result(None)
