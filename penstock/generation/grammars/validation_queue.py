"""One child process that validates grammars, and the requests that wait for it.

Clients take turns. Of one client's grammars the shortest is next: behind a gateway, or without keys, many
people are one client, and most grammars are short.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from heapq import heappop, heappush
from typing import TypeAlias

from penstock.generation.grammars.process import GrammarProcess
from penstock.generation.grammars.validation import Question, ValidationResult

_Entry: TypeAlias = tuple[int, int, asyncio.Future[None]]
"""A grammar that waits: its length, its number, and the future of its turn."""


class ValidationQueue:
    """Validates one grammar at a time."""

    def __init__(self, cpu_limit_s: float) -> None:
        """``cpu_limit_s``: CPU time for one grammar."""
        self.process = GrammarProcess(cpu_limit_s)
        self._thread = ThreadPoolExecutor(1, "penstock-grammar")
        self._busy = False
        self._waiting: OrderedDict[str, list[_Entry]] = OrderedDict()
        """A heap of its grammars by client, the next client first."""
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """Grammars that wait."""
        return sum(map(len, self._waiting.values()))

    async def validate(self, question: Question, client: str) -> ValidationResult | None:
        """None: it takes more CPU time than there is."""
        await self._turn(len(question.grammar), client)
        running = asyncio.get_running_loop().run_in_executor(self._thread, self.process.validate, question)
        # A cancelled request leaves the thread running; the next one begins when that has ended.
        running.add_done_callback(lambda _: self._begin_next())
        return await asyncio.shield(running)

    async def _turn(self, length: int, client: str) -> None:
        if not self._busy:
            self._busy = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heappush(self._waiting.setdefault(client, []), (length, next(self._numbers), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the turn had just come
                self._begin_next()
            raise

    def _begin_next(self) -> None:
        while self._waiting:
            client, grammars = self._waiting.popitem(last=False)
            turn = _shortest(grammars)
            if grammars:
                self._waiting[client] = grammars  # behind the other clients
            if turn is not None:
                turn.set_result(None)
                return
        self._busy = False

    def close(self) -> None:
        """End the child process."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.process.close()


def _shortest(grammars: list[_Entry]) -> asyncio.Future[None] | None:
    """Take the next grammar out of a heap; None if all its requests are cancelled."""
    while grammars:
        _, _, turn = heappop(grammars)
        if not turn.cancelled():
            return turn
    return None
