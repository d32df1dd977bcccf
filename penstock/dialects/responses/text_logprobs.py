"""Which of an output's logprobs are those of its text, where the output has reasoning and calls as well."""

from __future__ import annotations

import numpy as np

from penstock.generation.parsers.delta import CallDelta, Delta
from penstock.generation.replies.logprobs import TokenLogprobs
from penstock.streaming.detokenizer import Detokenizer

MAX_HELD = 64
"""Tokens of a call that are kept, as they may turn out to be text: the start of a mark."""


class TextLogprobs:
    """Logprobs of the pieces of one output's text. Pieces are found one after the other in the text of its
    tokens.

    A token belongs to the piece in which it begins; tokens of one character begin together. Tokens after
    the last piece are kept: their text may be held back, or its last character may not be complete.
    """

    __slots__ = ("_after_call", "_begins", "_detokenizer", "_kept", "_text")

    def __init__(self) -> None:
        self._kept: TokenLogprobs | None = None
        """Logprobs of tokens that no piece has."""
        self._begins: list[int] = []
        """Where in ``_text`` each of them begins."""
        self._text = ""
        self._after_call = False
        """Whether they may be those of a call, whose arguments may have any text."""
        self._detokenizer: Detokenizer | None = None

    def by_piece(self, delta: Delta, logprobs: TokenLogprobs | None) -> list[TokenLogprobs | None]:
        """For each piece of ``delta`` the logprobs of its tokens; None for what is no text. ``logprobs``: of
        the tokens that came with it."""
        if logprobs is None:
            return [None] * len(delta.pieces)
        self._add(logprobs)
        found: list[TokenLogprobs | None] = []
        for piece in delta.pieces:
            taken = None
            if isinstance(piece, CallDelta):
                self._after_call = True
                if len(delta.pieces) == 1:
                    count = max(len(self._begins) - MAX_HELD, 0)
                    self._forget(count, self._begins[count] if count else 0)
            else:
                find = self._text.rfind if self._after_call else self._text.find
                start = find(piece.text)
                if start < 0 and len(delta.pieces) == 1:  # the text of its tokens is not known
                    start = 0
                if start >= 0:
                    taken = self._take(start, start + len(piece.text))
                    self._after_call = False
                if piece.reasoning:
                    taken = None
            found.append(taken)
        return found

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

    def _take(self, start: int, end: int) -> TokenLogprobs | None:
        """Take the logprobs of tokens that begin within a part of the text; those before it are dropped."""
        before = sum(begin < start for begin in self._begins)
        after = sum(begin < end for begin in self._begins)
        assert self._kept is not None
        part = slice(before, after)
        taken = self._kept._replace(ids=self._kept.ids[part], values=self._kept.values[part])
        self._forget(after, end)
        return taken if after > before else None

    def _forget(self, count: int, end: int) -> None:
        """Forget the first tokens, and the text before ``end``."""
        if self._kept is not None:
            self._kept = self._kept._replace(ids=self._kept.ids[count:], values=self._kept.values[count:])
        self._begins = [begin - end for begin in self._begins[count:]]
        self._text = self._text[end:]
