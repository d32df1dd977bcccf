"""Counts the tokens of an output's reasoning, by where in the text it begins and ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from penstock.streaming.detokenizer import Detokenizer
from penstock.streaming.token_table import TokenTable


class _Row(NamedTuple):
    start: int
    """Characters before it."""
    position: int
    """Tokens before it."""
    context: Sequence[int]
    """The tokens before it of which a character may be unfinished."""
    tokens: Sequence[int]
    end: int


CONTEXT = 4
"""Bytes of a character, so tokens that it may consist of."""


class ReasoningTokens:
    """Counts the reasoning tokens of one output. A token is one of reasoning if it begins in it, so the marks
    around are none.

    Text that the parser of reasoning does not see has no mark; its tokens are of the kind before it.
    """

    __slots__ = ("_context", "_count", "_end", "_rows", "_since", "_table")

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._rows: deque[_Row] = deque()
        """Rows in which reasoning may still begin or end."""
        self._context: list[int] = []
        """The latest tokens."""
        self._end = 0
        """Characters of all rows."""
        self._count = 0
        self._since: int | None = None
        """Tokens before the reasoning that has not ended; None: all has ended."""

    def add(
        self, position: int, tokens: Sequence[int], length: int, turns: Sequence[int], settled: int
    ) -> None:
        """A row of ``tokens``, after ``position`` others, with a text of ``length`` characters. ``turns``,
        ``settled``: what the parser said then, see
        :meth:`~penstock.generation.parsers.message.MessageParser.take_turns`."""
        self._rows.append(_Row(self._end, position, self._context, tokens, self._end + length))
        self._end += length
        self._context = [*self._context, *tokens[-CONTEXT:]][-CONTEXT:]
        for turn in turns:
            place = self._place(turn)
            if self._since is None:
                self._since = place
            else:
                self._count += place - self._since
                self._since = None
        while self._rows and self._rows[0].end <= settled:
            self._rows.popleft()

    def end(self, position: int) -> None:
        """No more tokens follow the first ``position`` ones."""
        self._count, self._since = self.count(position), None

    def count(self, total: int) -> int:
        """Reasoning tokens among the first ``total``."""
        return self._count + (0 if self._since is None else max(total - self._since, 0))

    def _place(self, turn: int) -> int:
        """Number of tokens that begin before a place in the text."""
        row = next((row for row in self._rows if turn < row.end), self._rows[-1])
        if turn >= row.end:
            return row.position + len(row.tokens)
        detokenizer, at = Detokenizer(self._table), row.start
        detokenizer.push(row.context)
        for number, token in enumerate(row.tokens):
            if at >= turn:
                return row.position + number
            at += len(detokenizer.push((token,)))
        return row.position + len(row.tokens)
