"""The output of one choice as a message, which is parsed as its rows arrive."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.generation.parsers.delta import CallDelta, Delta
from penstock.generation.parsers.message import MessageParser
from penstock.generation.replies.reasoning_tokens import ReasoningTokens
from penstock.streaming.assembler import Assembler, RowText
from penstock.streaming.token_table import TokenTable
from penstock.wire.frames import FinishReason

PIECE_BYTES = 512
"""Memory of a piece of a message besides its text, and the share of a millisecond that sending it takes."""


class ParsedOutput:
    """The message of one choice: what was parsed of it and not taken yet."""

    __slots__ = ("_delta", "_exempt", "_reasoning", "_searched", "parser", "size")

    def __init__(self, parser: MessageParser, table: TokenTable, *, searched: bool, exempt: int) -> None:
        """``searched``: whether the parser has stop strings; ``exempt``: number of first tokens whose text is
        not searched for them."""
        self.parser = parser
        self.size = 0
        """Bytes of memory, about, that the latest row has added."""
        self._searched = searched
        self._exempt = exempt
        self._delta = Delta()
        self._reasoning = ReasoningTokens(table) if parser.reasons else None

    def __bool__(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._delta)

    def take_delta(self) -> Delta:
        delta, self._delta = self._delta, Delta()
        return delta

    def reasoning_tokens(self, total: int) -> int | None:
        """Reasoning tokens among the first ``total``; None if reasoning is not parsed."""
        return None if self._reasoning is None else self._reasoning.count(total)

    def begin(self, text: str) -> None:
        """The message starts with this text, which is no output."""
        self._push(text, exempt=True)
        if self._reasoning is not None:
            self._reasoning.add(0, (), len(text), *self.parser.take_turns())

    def add_tokens(
        self, assembler: Assembler, position: int, tokens: Sequence[int], finish: FinishReason
    ) -> RowText:
        """Parse a row, whose tokens come after ``position`` others. The result has no text."""
        used = self.size = 0
        for part in [(token,) for token in tokens] if self._searched else [tokens] if tokens else []:
            self._row(position + used, part, assembler.push(part).text)
            used += len(part)
            if self.parser.stop is not None:
                return RowText("", used, self.parser.stop)
        if finish:
            self.end(assembler, cut=finish is FinishReason.LENGTH)
            if self._reasoning is not None:
                self._reasoning.end(position + used)
        return RowText("", used, self.parser.stop)

    def end(self, assembler: Assembler, *, cut: bool = False) -> None:
        """No more tokens come; ``cut``: as max_tokens ended the output."""
        self._push(assembler.finish().text, last=True, cut=cut)

    def _row(self, position: int, tokens: Sequence[int], text: str) -> None:
        self._push(text, exempt=self._exempt > 0)
        self._exempt -= len(tokens)
        if self._reasoning is not None:
            self._reasoning.add(position, tokens, len(text), *self.parser.take_turns())

    def _push(self, text: str, *, last: bool = False, cut: bool = False, exempt: bool = False) -> None:
        delta = self.parser.push(text, last=last, cut=cut, exempt=exempt)
        for piece in delta.pieces:
            added = piece.arguments if isinstance(piece, CallDelta) else piece.text
            self.size += PIECE_BYTES + len(added)
        self._delta.add(delta)
