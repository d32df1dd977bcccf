"""Rows that take long to handle, in parts that take turns.

An event with the logprobs of a whole vocabulary takes milliseconds to make, and so does the parsing of
thousands of tokens. Rows of many such streams, and those that came meanwhile, would hold up all others for
seconds: streams, new requests, and the word that a client has left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from typing import NamedTuple

import numpy as np

from penstock.streaming.stream import Stream
from penstock.wire.frames import FinishReason
from penstock.wire.logprobs import ENTRY_CANDIDATES, Logprobs

TURN_CANDIDATES = 4096
"""Candidates whose rows are handled in one turn: about 6 ms (measured: 1.4 us per candidate)."""
PART_TOKENS = 512
"""Tokens of a part of a long row: about 5 ms where their text is hardest to parse (measured: up to 3 us per
character)."""
TOKEN_COST = 4
"""Candidates that take as long as a token does."""


class _Row(NamedTuple):
    tokens: Sequence[int]
    finish: FinishReason
    cached: int
    logprobs: Logprobs | None


Handler = Callable[[Stream, Sequence[int], FinishReason, int, Logprobs | None], None]


class WideRows:
    """Waiting rows by handle. Streams take turns, each with one part: PART_TOKENS, or one token with very
    many logprobs."""

    def __init__(self, handle_row: Handler, later: Callable[[Callable[[], None]], object]) -> None:
        """``later`` calls a function after other events have had their turn."""
        self._handle_row = handle_row
        self._later = later
        self._waiting: dict[int, tuple[Stream, deque[_Row]]] = {}
        self._scheduled = False

    def add(
        self,
        stream: Stream,
        tokens: Sequence[int],
        finish: FinishReason,
        cached: int,
        logprobs: Logprobs | None,
        *,
        written: bool,
    ) -> bool:
        """Take a row that is to be handled later: a long one, a wide one, or one behind another; False for
        others. ``written``: it becomes an event, so its logprobs count."""
        wide = written and logprobs is not None and logprobs.ids.size > ENTRY_CANDIDATES * len(tokens)
        if not (wide or len(tokens) > PART_TOKENS or stream.handle in self._waiting):
            return False
        rows = self._waiting.setdefault(stream.handle, (stream, deque()))[1]
        *firsts, last = _parts(tokens, logprobs, 1 if wide else PART_TOKENS) or [((), None)]
        finishes = chain(repeat(FinishReason.NONE, len(firsts)), (finish,))
        for each, end, hit in zip((*firsts, last), finishes, chain((cached,), repeat(0)), strict=False):
            rows.append(_Row(each[0], end, hit, each[1]))
        self._schedule()
        return True

    def tokens(self, handle: int) -> int:
        """Tokens of a stream that wait."""
        waiting = self._waiting.get(handle)
        return 0 if waiting is None else sum(len(row.tokens) for row in waiting[1])

    def holds(self, handle: int) -> bool:
        """Whether rows of a stream wait."""
        return handle in self._waiting

    def ended(self, handle: int) -> bool:
        """Whether the last one of a stream's rows waits."""
        waiting = self._waiting.get(handle)
        return waiting is not None and bool(waiting[1][-1].finish)

    def finish(self, handle: int) -> None:
        """Handle all that waits of a stream."""
        while handle in self._waiting:
            self._handle_first(handle)

    def drop(self, handle: int) -> None:
        """Forget what waits of a stream."""
        self._waiting.pop(handle, None)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._later(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        done = 0
        while self._waiting and done < TURN_CANDIDATES:
            done += self._handle_first(next(iter(self._waiting)))
        if self._waiting:
            self._schedule()

    def _handle_first(self, handle: int) -> int:
        """Handle a stream's first row; its others wait behind those of other streams. Returns what it cost,
        in candidates."""
        stream, rows = self._waiting.pop(handle)
        row = rows.popleft()
        if rows:
            self._waiting[handle] = stream, rows
        self._handle_row(stream, *row)
        return TOKEN_COST * len(row.tokens) + (0 if row.logprobs is None else row.logprobs.ids.size)


def _parts(
    tokens: Sequence[int], logprobs: Logprobs | None, size: int
) -> list[tuple[Sequence[int], Logprobs | None]]:
    """So many tokens at a time, with their logprobs."""
    starts = range(0, len(tokens), size)
    parts = [tokens[start : start + size] for start in starts]
    if logprobs is None:
        return [(part, None) for part in parts]
    bounds = np.searchsorted(logprobs.token, [*starts, len(tokens)]).tolist()
    found = []
    for part, start, low, high in zip(parts, starts, bounds[:-1], bounds[1:], strict=True):
        found.append((part, logprobs.slice_entries(low, high, start)))
    return found
