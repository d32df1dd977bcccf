"""A stream's text from its tokens, with stop strings: the slow path's state of one stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.streaming.detokenizer import Detokenizer
from penstock.streaming.stop_strings import StopMatcher
from penstock.streaming.token_table import TokenTable


class TextDelta(NamedTuple):
    """What a row of tokens adds to a stream."""

    text: str
    """Text that is certain."""
    tokens_used: int
    """Tokens taken: fewer than given when a stop string was complete before the last one."""
    stop: str | None
    """The stop string that ends the stream, or None."""


class Assembler:
    """Detokenizer and stop strings of one stream whose tokens continue a prompt."""

    __slots__ = ("_detokenizer", "_exempt", "_matcher")

    def __init__(
        self, table: TokenTable, stops: Sequence[str] = (), *, include_stop: bool = False, exempt: int = 0
    ) -> None:
        """``exempt``: tokens at the start in whose text no stop string is looked for."""
        self._exempt = exempt
        self._detokenizer = Detokenizer(table)
        self._matcher = StopMatcher(stops, include=include_stop) if stops else None

    @property
    def pending(self) -> bool:
        """Whether something is held back, or the next token's text depends on what came before."""
        return self._matcher is not None or self._detokenizer.pending

    def push(self, tokens: Sequence[int]) -> TextDelta:
        if self._matcher is None:
            return TextDelta(self._detokenizer.push(tokens), len(tokens), None)
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
                return TextDelta(text, used, stop)
        return TextDelta(text, len(tokens), None)

    def finish(self) -> TextDelta:
        """The text still held back when the stream ends. Its last characters may complete a stop string."""
        rest = self._detokenizer.finish()
        if self._matcher is None:
            return TextDelta(rest, 0, None)
        text, stop = self._matcher.push(rest)
        return TextDelta(text if stop is not None else text + self._matcher.finish(), 0, stop)
