"""Validates the grammars of requests in child processes, and remembers which are valid."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

from penstock.generation.grammars.process import GrammarProcess, Question
from penstock.generation.grammars.schema_check import Verdict
from penstock.generation.structured_output import (
    MAX_GRAMMAR_BYTES,
    Constraint,
    too_large,
)
from penstock.http.admission import overloaded

KNOWN_GRAMMARS = 4096
"""Maximum number of valid grammars that are remembered, by a digest of 16 bytes each."""
PROCESSES = 2
"""Child processes: more than one, so that one client's slow grammars do not delay those of others."""
MAX_WAITING_BYTES = 16 << 20
"""Maximum size of all grammars that wait for a child or are validated."""


class GrammarChecker:
    """The validator of one API server."""

    def __init__(self) -> None:
        self._valid: OrderedDict[bytes, None] = OrderedDict()
        self._processes = [GrammarProcess() for _ in range(PROCESSES)]
        self._threads = ThreadPoolExecutor(PROCESSES, "penstock-grammar")
        self._idle: asyncio.Queue[GrammarProcess] = asyncio.Queue()
        for process in self._processes:
            self._idle.put_nowait(process)
        self._clients: dict[str, tuple[asyncio.Lock, int]] = {}
        """Clients with grammars here, of which one at a time is validated, and how many they have."""
        self._waiting_bytes = 0

    async def check(self, constraint: Constraint, client: str = "") -> Constraint:
        """The constraint, with its grammar translated if it was GBNF, and without the patterns of its loose
        parts that cannot be enforced. ``client``: who sent it.

        Raises ApiError with the field and the reason if the grammar is invalid or takes too long to check,
        and 429 if too many wait to be checked.
        """
        text = constraint.grammar
        size = len(text)
        if size > MAX_GRAMMAR_BYTES:
            raise constraint.fault(too_large(size))
        loose = constraint.loose()
        digest = blake2b(text.encode() + repr((constraint.kind, loose)).encode(), digest_size=16).digest()
        if digest in self._valid:
            self._valid.move_to_end(digest)
            return constraint
        if self._waiting_bytes + size > MAX_WAITING_BYTES:
            raise overloaded("Too many grammars of other requests wait to be checked.")
        self._waiting_bytes += size
        try:
            async with self._turn(client):
                verdict = await self._validate(Question(text, constraint.kind, loose))
        finally:
            self._waiting_bytes -= size
        if verdict.problem:
            raise constraint.fault(verdict.problem, verdict.path)
        if verdict.grammar:  # not remembered, as its translation would have to be
            return constraint._replace(grammar=verdict.grammar, kind="llguidance")
        self._valid[digest] = None
        if len(self._valid) > KNOWN_GRAMMARS:
            self._valid.popitem(last=False)
        return constraint

    @contextlib.asynccontextmanager
    async def _turn(self, client: str) -> AsyncIterator[None]:
        lock, count = self._clients.get(client) or (asyncio.Lock(), 0)
        self._clients[client] = lock, count + 1
        try:
            async with lock:
                yield
        finally:
            lock, count = self._clients[client]
            if count > 1:
                self._clients[client] = lock, count - 1
            else:
                del self._clients[client]

    async def _validate(self, question: Question) -> Verdict:
        process = await self._idle.get()
        running = asyncio.get_running_loop().run_in_executor(self._threads, process.validate, question)
        # A cancelled request leaves its thread running; the process is idle when that has ended.
        running.add_done_callback(lambda _: self._idle.put_nowait(process))
        return await asyncio.shield(running)

    def close(self) -> None:
        """Ends the child processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.close()
