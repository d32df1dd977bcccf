"""What followed contexts, as a hash table of bounded size: per context a token, and how sure it is.

An entry is a key and a value, two uint64. A value has its confidence in the upper 16 bits, so that the best
of several values is their maximum, then a state of 8 bits, and the token in the lower 32 bits. The state
counts how often the token followed the context, and how often another one did: 4 bits each, recent events
weigh more. A context that finds its entry taken by another halves the other's hits, and replaces it at none:
entries that proved themselves stay, and all others make room for newer ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.engine.speculation.context_keys import U64

CERTAIN = 1 << 16
"""Confidences are in units of 1 / CERTAIN."""
TOKEN_BITS = np.uint64(32)
TOKEN_MASK = np.uint64((1 << 32) - 1)
CONFIDENCE_SHIFT = np.uint64(48)

_ENTRY_BYTES = 16
_STATE_MASK = np.uint64(0xFF)
_MOST = 15
"""Hits or misses of a state."""
_TAKEN, _OTHER_TOKEN, _SAME_TOKEN = 0, 1, 2
"""Events: the entry has another context, or this one with another token, or with this token."""

_HITS = (1, 2, 3, 4, 8, _MOST)
_WRONG_SHARE = (1, 0.45, 0.25, 0.15, 0.07, 0.02)
"""Wrong predictions after so many hits, as a share of those after one."""
_WRONG_AFTER_MISS = (0.75, 0.48, 0.37, 0.28, 0.13, 0.04)


class ContextTable:
    """Entries for contexts of several sizes, in ``size_bytes`` at most (rounded down to a power of two of
    entries); memory is committed as entries are written."""

    def __init__(self, size_bytes: int, priors: tuple[float, ...]) -> None:
        """``priors``: for each context size, the probability that a token which followed a context once
        follows it the next time."""
        bits = max((size_bytes // _ENTRY_BYTES).bit_length() - 1, 1)
        self._size = 1 << bits
        self.clear()
        self._shift = np.uint64(64 - bits)
        self._next, self._keeps = _transitions(priors)
        self._shift_int = 64 - bits
        self._next_ints = self._next.tolist()
        self._keep_bytes = self._keeps.tobytes()
        self._of_size = (np.arange(len(priors), dtype=np.uint64) << np.uint64(10))[:, None]

    def clear(self) -> None:
        """Forget all entries, and return their memory."""
        self._entries = np.zeros((self._size, 2), np.uint64)
        self._wholes = self._entries.reshape(-1).view(np.complex128)
        """The entries in elements of one entry each: they are copied in a tenth of the time, and one that
        is written twice has key and value of the same writer."""
        # The same for single rows: a value read by an index is an int, in a fraction of NumPy's time.
        self._words = self._entries.reshape(-1).data

    def predict(self, keys: U64) -> U64:
        """The value of greatest confidence for each column of uint64[sizes, n] keys. Returns uint64[n]; 0: no
        context has an entry."""
        entries = self._entries.take((keys >> self._shift).view(np.int64), axis=0)
        values = entries[..., 1] * (entries[..., 0] == keys)
        best: U64 = np.maximum.reduce(values, axis=0)
        return best

    def learn(self, keys: U64, tokens: U64) -> None:
        """Note that tokens, uint64[n], followed contexts with keys uint64[sizes, n]. A context that is there
        more than once counts once."""
        places = (keys >> self._shift).view(np.int64)
        entries = self._entries.take(places, axis=0)
        values = entries[..., 1]
        known = entries[..., 0] == keys
        same = (values & TOKEN_MASK) == tokens
        event = (known.view(np.uint8) + (same & known)).astype(np.uint64) << np.uint64(8)
        event += (values >> TOKEN_BITS) & _STATE_MASK
        event += self._of_size
        event = event.view(np.int64)
        keeps = self._keeps.take(event)
        values = np.where(keeps, values & TOKEN_MASK, tokens)
        values |= self._next.take(event)
        entries[..., 1] = values
        np.copyto(entries[..., 0], keys, where=known | ~keeps)
        self._wholes[places] = entries.view(np.complex128)[..., 0]

    def predict_one(self, keys: list[int]) -> int:
        """:meth:`predict` for one column of keys."""
        words, shift = self._words, self._shift_int
        best = 0
        for key in keys:
            place = key >> shift << 1
            if words[place] == key:
                best = max(best, words[place + 1])
        return best

    def learn_one(self, keys: list[int], token: int) -> None:
        """:meth:`learn` for one column of keys, by size, and one token."""
        words, shift = self._words, self._shift_int
        for size, key in enumerate(keys):
            place = key >> shift << 1
            value = words[place + 1]
            old = value & 0xFFFFFFFF
            known = words[place] == key
            event = size << 10 | (known + (known and old == token)) << 8 | value >> 32 & 0xFF
            keeps = self._keep_bytes[event]
            if known or not keeps:
                words[place] = key
            words[place + 1] = self._next_ints[event] | (old if keeps else token)


def _transitions(priors: tuple[float, ...]) -> tuple[U64, NDArray[np.bool_]]:
    """uint64 and bool[sizes * 1024], by size, event and state: the value without its token after the event,
    and whether the entry keeps its token."""
    after = np.zeros((len(priors), 4, 256), np.uint64)
    keeps = np.zeros((4, 256), np.bool_)
    for event in (_TAKEN, _OTHER_TOKEN, _SAME_TOKEN):
        for state in range(256):
            hits, misses, keeps[event, state] = _step(event, state >> 4, state & 15)
            for size, prior in enumerate(priors):
                confidence = int(_confidence(hits, misses, prior) * (CERTAIN - 1))
                after[size, event, state] = confidence << 48 | (hits << 4 | misses) << 32
    return after.reshape(-1), np.tile(keeps.reshape(-1), len(priors))


def _step(event: int, hits: int, misses: int) -> tuple[int, int, bool]:
    """Hits and misses after an event, and whether the entry keeps its token."""
    if event == _SAME_TOKEN:
        return min(hits + 1, _MOST), misses - (misses > 2), True
    if hits >= 2:
        return hits // 2, min(misses + (event == _OTHER_TOKEN), _MOST), True
    if event == _OTHER_TOKEN:
        return 1, min(misses + 1, _MOST), False
    return 1, 0, False


def _confidence(hits: int, misses: int, prior: float) -> float:
    """The probability that the token follows again, which is ``prior`` after one hit and no miss. The figures
    are measured (tests/engine/speculation/replay.py): contexts that had another token are alike in all
    sizes."""
    if misses:
        after_miss = float(np.interp(hits, _HITS, _WRONG_AFTER_MISS))
        return 1 - after_miss - (0.13 * (misses - 1) / (_MOST - 1) if hits == 1 else 0)
    return 1 - (1 - prior) * float(np.interp(hits, _HITS, _WRONG_SHARE))
