"""Finds the tokens that would complete a bad word."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.engine.batch.slots import SlotTable
from penstock.engine.batch.token_lists import TokenLists
from penstock.wire.arrays import I32

Slots = NDArray[np.intp]


class BadWords:
    """Token sequences per slot that the slot's output must not contain; choices of a request share theirs.

    A step looks at the last two tokens of each word. Only for words whose last token but one is the last of
    the output are all tokens compared.
    """

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._words = TokenLists(table.size, np.int64, np.int64, np.int64, np.int64)
        """Per word: its last token, the one before it (-1: none), its length, and the index of its first
        token among the list's tokens."""
        self._tokens = TokenLists(table.size, np.int64)
        """The tokens of all words, one word after another."""

    def set(self, slot: int, words: Sequence[Sequence[int]]) -> None:
        """Give a slot that has none its words, each of at least one token."""
        row = self._words.share(slot, words)
        if row is not None:
            length = np.fromiter(map(len, words), np.int64, len(words))
            before = [word[-2] if len(word) > 1 else -1 for word in words]
            self._words.fill(row, [word[-1] for word in words], before, length, np.cumsum(length) - length)
        row = self._tokens.share(slot, words)
        if row is not None:
            self._tokens.fill(row, [token for word in words for token in word])

    def clear(self, slot: int) -> None:
        self._words.clear(slot)
        self._tokens.clear(slot)

    def completing(self, slots: Slots, length: I32) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows and last tokens of the words whose other tokens are the end of the slot's output, which ends
        after ``length`` int32[n] tokens of the history."""
        table = self._table
        newest = np.where(length > table.base[slots], table.history[slots, length - 1], -2)
        row, (last, before, size, first) = self._words.gather(slots)
        found = before == newest[row]
        found |= size == 1
        longer = np.flatnonzero(found & (size > 2))
        if len(longer):
            owner = row[longer]
            found[longer] = self._are_complete(slots[owner], length[owner], size[longer], first[longer])
        return row[found], last[found]

    def _are_complete(
        self, slots: Slots, length: I32, size: NDArray[np.int64], first: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """bool[n]: whether all tokens but the last of each word, given by its slot, length and first index,
        are the end of the slot's output, which ends after ``length`` tokens of the history."""
        table = self._table
        rest = size - 1
        ends = np.cumsum(rest)
        word = np.repeat(np.arange(len(rest)), rest)
        within = np.arange(len(word)) - np.repeat(ends - rest, rest)
        slot = slots[word]
        position = length[word] - rest[word] + within
        (wanted,) = self._tokens.items(slot, first[word] + within)
        missing = position < table.base[slot]
        missing |= table.history[slot, np.maximum(position, 0)] != wanted
        complete: NDArray[np.bool_] = np.bincount(word, missing, len(rest)) == 0
        return complete
