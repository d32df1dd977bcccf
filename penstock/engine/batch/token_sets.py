"""Sets of tokens per slot (allowed tokens, stop ids) as bitmasks, which the choices of a request share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.engine.batch.shared_rows import SharedRows
from penstock.wire.arrays import I32

Slots = NDArray[np.intp]


class TokenSets:
    """A set of tokens per slot, at first empty. Memory, an eighth of a byte per token of the vocabulary, is
    committed for each distinct set."""

    def __init__(self, slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows = SharedRows(slots)
        self._bits = np.zeros((slots + 1, packed_size(vocab_size)), np.uint8)

    def __bool__(self) -> bool:
        """Whether any slot has a set."""
        return bool(len(self._rows))

    def set(self, slot: int, tokens: Sequence[int]) -> None:
        """Give a slot that has none its set. Tokens outside the vocabulary are left out. Slots whose
        ``tokens`` are the same object share memory."""
        row = self._rows.acquire(slot, tokens)
        if row is not None:
            self._bits[row] = token_bits(tokens, self._vocab_size)

    def clear(self, slot: int) -> None:
        """Make a slot's set empty."""
        self._rows.release(slot)

    def contain(self, slots: Slots, tokens: I32) -> NDArray[np.bool_]:
        """bool[n]: whether each slot's set has the token beside it, all in the vocabulary."""
        bits = self._bits[self._rows.of_slot[slots], tokens >> 3] >> (tokens & 7).astype(np.uint8)
        contained: NDArray[np.bool_] = (bits & 1).astype(np.bool_)
        return contained

    def bits(self, slots: Slots) -> NDArray[np.uint8]:
        """uint8[n, bytes]: token t is bit t % 8 of byte t // 8."""
        return self._bits[self._rows.of_slot[slots]]


def token_bits(tokens: Sequence[int], vocab_size: int) -> NDArray[np.uint8]:
    """uint8[bytes]: a set of tokens as a bitmask, token t is bit t % 8 of byte t // 8. Tokens outside the
    vocabulary are left out."""
    ids = np.array(tokens, np.int64)
    members = np.zeros(8 * packed_size(vocab_size), np.bool_)
    members[ids[(ids >= 0) & (ids < vocab_size)]] = True
    return np.packbits(members, bitorder="little")


def packed_size(vocab_size: int) -> int:
    """Bytes of a token bitmask: whole 32-bit words, as llguidance writes them."""
    return -(-vocab_size // 32) * 4
