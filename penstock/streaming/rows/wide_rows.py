"""Rows of streamed replies with very many logprobs, handled a few at a time.

An event with the logprobs of a whole vocabulary takes milliseconds to make. Rows of many such streams,
and those that came meanwhile, would hold up all others for seconds: streams, new requests, and the word that
a client has left.
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


class _Row(NamedTuple):
    tokens: Sequence[int]
    finish: FinishReason
    cached: int
    logprobs: Logprobs | None


Handler = Callable[[Stream, Sequence[int], FinishReason, int, Logprobs | None], None]


class WideRows:
    """Waiting rows by handle. Streams take turns, each with one token."""

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
    ) -> bool:
        """Take a row that is to be handled later: a wide one, or one behind another; False for others."""
        wide = logprobs is not None and logprobs.ids.size > ENTRY_CANDIDATES * len(tokens)
        if not (wide or stream.handle in self._waiting):
            return False
        rows = self._waiting.setdefault(stream.handle, (stream, deque()))[1]
        *firsts, last = _single_tokens(tokens, logprobs) or [((), None)]
        finishes = chain(repeat(FinishReason.NONE, len(firsts)), (finish,))
        for each, end, hit in zip((*firsts, last), finishes, chain((cached,), repeat(0)), strict=False):
            rows.append(_Row(each[0], end, hit, each[1]))
        self._schedule()
        return True

    def tokens(self, handle: int) -> int:
        """Tokens of a stream that wait."""
        waiting = self._waiting.get(handle)
        return 0 if waiting is None else sum(len(row.tokens) for row in waiting[1])

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
        """Handle a stream's first row; its others wait behind those of other streams. Returns the number of
        its candidates."""
        stream, rows = self._waiting.pop(handle)
        row = rows.popleft()
        if rows:
            self._waiting[handle] = stream, rows
        self._handle_row(stream, *row)
        return 0 if row.logprobs is None else row.logprobs.ids.size


def _single_tokens(
    tokens: Sequence[int], logprobs: Logprobs | None
) -> list[tuple[Sequence[int], Logprobs | None]]:
    """Each token with its logprobs."""
    if logprobs is None:
        return [(tokens, None)] if tokens else []
    bounds = np.searchsorted(logprobs.token, np.arange(len(tokens) + 1)).tolist()
    spans = zip(tokens, bounds[:-1], bounds[1:], strict=True)
    return [
        ((token,), logprobs.take(np.arange(low, high), np.zeros(high - low, np.int32)))
        for token, low, high in spans
    ]
