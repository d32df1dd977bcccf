"""Which of an output's logprobs are those of its text, where the output has reasoning and calls as well."""

from __future__ import annotations

import numpy as np

from penstock.generation.parsers.delta import CallDelta, Delta, TextDelta
from penstock.generation.replies.logprobs import TokenLogprobs
from penstock.streaming.detokenizer import Detokenizer


class TextLogprobs:
    """Of one output. Its pieces are found one after the other in the text of its tokens.

    A token belongs to the piece in which it begins; tokens of one character begin together. Tokens after
    the last piece are kept: their text may be held back, or its last character may not be complete.
    """

    __slots__ = ("_begins", "_detokenizer", "_kept", "_text")

    def __init__(self) -> None:
        self._kept: TokenLogprobs | None = None
        """Of tokens that no piece has."""
        self._begins: list[int] = []
        """Where in ``_text`` each of them begins."""
        self._text = ""
        self._detokenizer: Detokenizer | None = None

    def entries_by_piece(self, delta: Delta, logprobs: TokenLogprobs | None) -> list[bytes | None]:
        """For each piece of ``delta`` the logprobs of its tokens as a JSON list; None for what is no text.
        ``logprobs``: of the tokens that came with it."""
        if logprobs is None:
            return [None] * len(delta.pieces)
        if delta.pieces and isinstance(delta.pieces[0], CallDelta):  # what came before it is no text
            self._drop(len(self._begins))
        self._add(logprobs)
        found: list[bytes | None] = []
        for number, piece in enumerate(delta.pieces, 1):
            entries = None
            if isinstance(piece, TextDelta):
                start = self._text.find(piece.text)
                if number == len(delta.pieces) > 1 and self._text.endswith(piece.text):
                    start = len(self._text) - len(piece.text)  # arguments before it may have the same text
                if start < 0 and len(delta.pieces) == 1:  # the text of its tokens is not known
                    start = 0
                if start >= 0:
                    entries = self._take(start, start + len(piece.text))
                if piece.reasoning:
                    entries = None
            found.append(entries)
        return found

    def entries(self, logprobs: TokenLogprobs) -> bytes:
        """Where all further output is text: those of tokens that came, after those of a character whose
        first ones came before."""
        complete = sum(begin < len(self._text) for begin in self._begins)
        self._drop(complete)
        self._add(logprobs)
        assert self._kept is not None
        kept, self._kept, self._begins, self._text = self._kept, None, [], ""
        return b"".join(kept.entries())

    def _add(self, logprobs: TokenLogprobs) -> None:
        if self._detokenizer is None:
            self._detokenizer = logprobs.names.detokenizer()
        parts, length = [self._text], len(self._text)
        for token in logprobs.ids[:, 0].tolist():
            self._begins.append(length)
            parts.append(self._detokenizer.push((token,)))
            length += len(parts[-1])
        self._text = "".join(parts)
        if self._kept is not None:
            ids = np.concatenate([self._kept.ids, logprobs.ids])
            values = np.concatenate([self._kept.values, logprobs.values])
            logprobs = logprobs._replace(ids=ids, values=values)
        self._kept = logprobs

    def _take(self, start: int, end: int) -> bytes | None:
        """Those of tokens that begin within a part of the text; those before it are dropped."""
        before = sum(begin < start for begin in self._begins)
        after = sum(begin < end for begin in self._begins)
        assert self._kept is not None
        part = slice(before, after)
        taken = self._kept._replace(ids=self._kept.ids[part], values=self._kept.values[part])
        self._drop(after)
        self._begins = [begin - end for begin in self._begins]
        self._text = self._text[end:]
        return b"".join(taken.entries()) if after > before else None

    def _drop(self, count: int) -> None:
        """Forget the first tokens."""
        if self._kept is not None:
            self._kept = self._kept._replace(ids=self._kept.ids[count:], values=self._kept.values[count:])
        del self._begins[:count]
