"""Where the tokens of an output begin in its text."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.streaming.detokenizer import Detokenizer
from penstock.streaming.token_table import TokenTable


class TextPlaces:
    """Where the tokens of one choice begin in its text. A token with a part of a character begins where that
    character does; a token without text, and one that only a stop string had text of, where the next one
    would."""

    __slots__ = ("_begin", "_detokenizer", "_echo", "_first", "_table", "at", "end")

    def __init__(self, table: TokenTable, echo: str = "", begin: str = "") -> None:
        """``table``: of the tokens as the text has them. ``echo``: the text before the output, whose
        tokens come first; ``begin``: what it has of the first one, if that is special."""
        self._table = table
        self._detokenizer = Detokenizer(table)
        self._echo = echo
        self._begin = begin
        self._first = bool(echo)
        """Whether the next token with text is the first one of the echo."""
        self.at = 0
        """Where the next token begins, unless it is a part of a character that has begun."""
        self.end: int | None = None
        """Characters of the text, if a stop string has cut it."""

    def next(self, tokens: Iterable[int]) -> list[int]:
        """The places of the tokens that come next."""
        places, known = [], self._table.text
        for token in tokens:
            escaped = known[token] if token < len(known) else None
            if escaped and escaped.isascii() and b"\\" not in escaped and not self._special():
                places.append(self.at if self.end is None else min(self.at, self.end))
                self.at += len(escaped)
                continue
            pending = self._detokenizer.pending
            text = self._detokenizer.push((token,)) or self._begin
            own = self._table.bytes_of(token) if pending and text else None
            before = 0 if own is None else max(len(text) - len(own.decode(errors="replace")), 0)
            place = self.at + before
            places.append(place if self.end is None else min(place, self.end))
            self._begin = ""
            if text and self._first:
                self._first = False
                # Some tokenizers put a space before a text.
                if text[0] == " " and self._echo[0] != " ":
                    text = text[1:]
            self.at += len(text)
        return places

    def _special(self) -> bool:
        """Whether the next token's place or text depends on others, or on the echo."""
        return self._detokenizer.pending or self._first or bool(self._begin)
