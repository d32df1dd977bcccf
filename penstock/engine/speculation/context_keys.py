"""64-bit keys of the contexts of several sizes that end at positions of token windows, one window per row.

The key of a context is a polynomial of its tokens, modulo 2**64, times a factor of its size and scope. The
base of the polynomial and the factors are secret and drawn at the start of the process: keys of two scopes
have nothing in common that a client could arrange for. Sums over a window are kept, so the keys at a further
token take a few array operations, however long the contexts.
"""

from __future__ import annotations

import secrets

import numpy as np
from numpy.typing import NDArray

from penstock.wire.arrays import I32

U64 = NDArray[np.uint64]

_WORD = (1 << 64) - 1
_ONE = np.uint64(1)


class KeySpace:
    """The secrets of one process, for contexts of the given sizes in tokens."""

    def __init__(self, sizes: tuple[int, ...], most_tokens: int, seed: int | None = None) -> None:
        """``most_tokens``: a window has at most so many tokens. ``seed``: not random, for tests."""
        self.sizes = np.array(sizes, np.intp)[:, None]
        self._secret = secrets.randbits(64) if seed is None else seed
        base = self._odd(-1)
        self.powers = _powers(base, most_tokens)
        self.inverses = _powers(pow(base, -1, 1 << 64), most_tokens + 1)
        """``inverses[i]``: base ** -i, which makes sums that begin at different tokens comparable."""
        self.power_ints, self.inverse_ints = self.powers.tolist(), self.inverses.tolist()
        self._size_factors = np.array([self._odd(-2 - size) for size in sizes], np.uint64)

    def factors(self, scope: int) -> U64:
        """uint64[sizes], odd: what the keys of a scope are multiplied by."""
        return self._size_factors * np.uint64(self._odd(scope))

    def _odd(self, number: int) -> int:
        """A secret odd number for each 64-bit number, by the mixing function of SplitMix64 (Steele et al.,
        "Fast splittable pseudorandom number generators", 2014), applied twice."""
        mixed = number & _WORD
        for _ in range(2):
            mixed = (mixed ^ self._secret) + 0x9E3779B97F4A7C15 & _WORD
            mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _WORD
            mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _WORD
            mixed ^= mixed >> 31
        return mixed | 1


class ContextKeys:
    """Keys along the windows of some rows, which grow by a token at a time."""

    def __init__(self, space: KeySpace, tokens: I32, factors: U64, room: int) -> None:
        """``tokens``: int32[window, rows]; -1 where a history has not begun. ``factors``: uint64[sizes,
        rows]. ``room``: tokens that will be appended at most."""
        self._space = space
        self._factors = factors
        self.end, rows = tokens.shape
        terms = (tokens + 1).astype(np.uint64)  # no token is 0, or leading ones would not count
        terms *= space.powers[: self.end, None]
        self._sums = np.zeros((self.end + room + 1, rows), np.uint64)
        """Row i: sums of the terms of the first i tokens."""
        np.add.accumulate(terms, axis=0, out=self._sums[1 : self.end + 1])

    def along(self, first: int) -> U64:
        """uint64[sizes, end - first + 1, rows]: keys of the contexts that end before token ``first`` of the
        windows, and so on up to their ends."""
        ends = np.arange(first, self.end + 1)
        keys: U64 = self._sums[first : self.end + 1] - self._sums.take(ends - self._space.sizes, axis=0)
        keys *= self._space.inverses[first : self.end + 1, None]
        keys *= self._factors[:, None]
        return keys

    def at_end(self) -> U64:
        """uint64[sizes, rows]: keys of the contexts that end with the windows."""
        keys: U64 = self._sums[self.end] - self._sums.take(self.end - self._space.sizes[:, 0], axis=0)
        keys *= self._factors * self._space.inverses[self.end]
        return keys

    def append(self, tokens: U64) -> None:
        """One more token for each row."""
        term = tokens + _ONE
        term *= self._space.powers[self.end]
        np.add(self._sums[self.end], term, out=self._sums[self.end + 1])
        self.end += 1


class OneRowKeys:
    """:class:`ContextKeys` of one row, by integers: array operations would take ten times as long."""

    def __init__(self, space: KeySpace, tokens: list[int], factors: list[int]) -> None:
        self._space = space
        self._factors = list(zip(space.sizes[:, 0].tolist(), factors, strict=True))
        self._sums = [0]
        for token in tokens:
            self.append(token)

    def at(self, end: int) -> list[int]:
        """Keys of the contexts that end before token ``end`` of the window, by size."""
        sums = self._sums
        last, inverse = sums[end], self._space.inverse_ints[end]
        return [(last - sums[end - size]) * inverse * factor & _WORD for size, factor in self._factors]

    def append(self, token: int) -> None:
        sums = self._sums
        sums.append(sums[-1] + (token + 1) * self._space.power_ints[len(sums) - 1] & _WORD)


def _powers(base: int, count: int) -> U64:
    """uint64[count]: base ** i, modulo 2**64."""
    powers = np.full(count, base, np.uint64)
    powers[:1] = 1
    product: U64 = np.multiply.accumulate(powers)
    return product
