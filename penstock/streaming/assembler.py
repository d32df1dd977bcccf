"""Turns one stream's tokens into text and applies its stop strings: the slow path's state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.streaming.detokenizer import Detokenizer
from penstock.streaming.stop_strings import StopMatcher
from penstock.streaming.token_table import TokenTable


class RowText(NamedTuple):
    """The text that a row of tokens adds to a stream."""

    text: str
    """Final text: later tokens cannot change it."""
    tokens_used: int
    """Tokens consumed; fewer than given if an earlier one completed a stop string."""
    stop: str | None
    """The stop string that ends the stream, or None."""


class Assembler:
    """Detokenizer and stop strings of one stream whose tokens continue a prompt."""

    __slots__ = ("_detokenizer", "_exempt", "_matcher", "characters")

    def __init__(
        self, table: TokenTable, stops: Sequence[str] = (), *, include_stop: bool = False, exempt: int = 0
    ) -> None:
        """``exempt``: number of first tokens whose text is not searched for stop strings."""
        self.characters = 0
        """Characters of all text that was final."""
        self._exempt = exempt
        self._detokenizer = Detokenizer(table)
        self._matcher = StopMatcher(stops, include=include_stop) if stops else None

    @property
    def pending(self) -> bool:
        """Whether text is held back, or the next token's text depends on earlier tokens."""
        return self._matcher is not None or self._detokenizer.pending

    def push(self, tokens: Sequence[int]) -> RowText:
        """Take the stream's next tokens."""
        delta = self._push(tokens)
        self.characters += len(delta.text)
        return delta

    def _push(self, tokens: Sequence[int]) -> RowText:
        if self._matcher is None:
            return RowText(self._detokenizer.push(tokens), len(tokens), None)
        text = ""
        for used, token in enumerate(tokens, 1):
            added = self._detokenizer.push((token,))
            if self._exempt:
                self._exempt -= 1
                text += added
                continue
            certain, stop = self._matcher.push(added)
            text += certain
            if stop is not None:
                return RowText(text, used, stop)
        return RowText(text, len(tokens), None)

    def finish(self) -> RowText:
        """The held-back text at the stream's end, which may complete a stop string."""
        rest = self._detokenizer.finish()
        if self._matcher is None:
            return RowText(rest, 0, None)
        text, stop = self._matcher.push(rest)
        text = text if stop is not None else text + self._matcher.finish()
        self.characters += len(text)
        return RowText(text, 0, stop)
