"""Where the last tokens of a history stood before in the same history, in a time that does not depend on its
length.

Each slot has a hash table per context size: the position behind the latest occurrence of a context of so many
tokens. Entries are never cleared: what is found is compared with the history, so an entry of another context,
or of a stream that had the slot before, is no match.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.engine.batch.slots import SlotTable
from penstock.engine.batch.sparse_zeros import sparse_zeros
from penstock.wire.arrays import I32

Slots = NDArray[np.intp]

LONGEST, SHORTEST = 5, 2
"""Tokens of contexts. Over this project's docs (tests/engine/speculation/replay.py), with drafts of at most 4
by :mod:`ngram`, 0.30 drafts are accepted per step with contexts of 2 to 5, 0.21 with 3 to 5, 0.16 with 4 and
5; with 2 to 8 no more than with 2 to 5."""
MAX_BUCKETS = 1 << 16
"""Per slot and context size: 1 MiB per slot at most. Histories that are longer lose old entries to
newer ones with the same hash."""
FEWEST_BUCKETS = 1 << 8
MAX_BEHIND = 64
"""Tokens that a history may have grown by to be indexed one by one."""
_FULL = np.iinfo(np.int32).max
NO_DRAFT = -(1 << 30)
"""In the place of a draft's length: what a history has grown by, or is shorter than that of the slot's last
stream, is never one more."""
_FACTORS = np.array([0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1], np.uint32)
"""Odd, with bits set all over: the upper bits of a sum of products depend on all tokens."""
_FACTOR_INTS = _FACTORS.tolist()
_SIZES = range(LONGEST, SHORTEST - 1, -1)
_TRIED = (LONGEST, *_SIZES)
"""Tokens that must match: behind the occurrence that was found last, if it goes on, or at the latest one of
each context. The former is right more often, as a quotation goes on where it was: of a quoted page, 3.9 of 4
drafts are accepted per step in place of 3.5."""


class HistoryIndex:
    """An index over the histories of a slot table.

    Memory is committed as histories grow, 16 to 64 bytes per token up to ``most_buckets`` tokens.
    """

    def __init__(self, table: SlotTable, most_buckets: int = MAX_BUCKETS, *, outputs: bool = True) -> None:
        """``most_buckets``: a power of two. ``outputs``: whether occurrences in outputs are found, or only
        those in prompts."""
        self._outputs = outputs
        self._base = table.base
        slots, width = table.size, table.max_model_len
        self._length = table.length
        self._rows = table.history
        self._history = table.history.reshape(-1)
        self._row_starts = np.arange(slots, dtype=np.intp) * width
        self._tried = np.array(_TRIED, np.int32)[:, None]
        self._back = np.arange(1, LONGEST + 1, dtype=np.intp)[:, None]
        self._factors = _FACTORS[:, None]
        self._unused = (self._back > self._tried.T)[:, :, None]
        """bool[LONGEST, tries, 1]: tokens, backwards, that do not belong to a context of each size."""

        self._most_bits = (min(_power_of_two(width), most_buckets) - 1).bit_length()
        buckets = 1 << self._most_bits
        self._entries: I32 = sparse_zeros((slots * len(_SIZES) * buckets,), np.int32)
        """Flat [slots, sizes, buckets]: positions in the history; 0: none."""
        self._tables = (np.arange(slots) * len(_SIZES) + np.arange(len(_SIZES))[:, None]) * buckets
        """intp[sizes, slots]: first entry of each table."""

        # -- per stream
        self._looked_up = np.zeros(slots, np.int32)
        """Length at the last lookup. Contexts that end before it are in the index; that which ends there is
        ``_pending``."""
        self._pending = np.zeros((slots, len(_SIZES)), np.intp)
        """Entries for the context that ends at ``_looked_up``. It is written when a token follows it, or it
        would be found as its own earlier occurrence."""
        self._room = np.zeros(slots, np.int32)
        """Length at which the slot's tables are too small, and are built anew; 0: nothing is indexed."""
        self._distance = np.zeros(slots, np.int32)
        """Tokens between the end of the history and the occurrence that the last lookup found; 0: none."""
        self._matched = np.zeros(slots, np.int32)
        """Tokens that match there."""
        self._followed = np.zeros(slots, np.int32)
        """Length of the history up to which the occurrence was compared with it."""
        self.drafted = np.full(slots, NO_DRAFT, np.int32)
        """Tokens of the slot's draft, which are those behind the occurrence; NO_DRAFT: it has no draft."""
        self._shift = np.zeros(slots, np.uint32)
        """Bits of a hash that do not belong to a bucket."""

    def forget(self, slot: int) -> None:
        """Another stream has the slot. Its history is indexed at the first lookup."""
        self._looked_up[slot] = self._distance[slot] = 0
        self._room[slot] = 0
        self.drafted[slot] = NO_DRAFT

    def follow(self, slots: Slots, length: I32) -> tuple[I32, I32, NDArray[np.bool_]]:
        """The occurrences that the last lookups found, where a draft from there was accepted and the token
        after it is the same as well. It takes a fraction of a lookup; what the histories have grown by is
        indexed at the next one.

        Returns the positions and matching tokens as :meth:`find_occurrence` does, and bool[n]: which of them
        go on; what the others have is not valid.
        """
        distance = self._distance[slots]
        new = length - self._followed[slots]
        last = self._row_starts[slots] + length - 1
        goes_on = new == self.drafted[slots] + 1
        goes_on &= self._history.take(last) == self._history.take(last - distance)
        matched = self._matched[slots] + new
        going, now = (slots, length) if goes_on.all() else (slots[goes_on], length[goes_on])
        self._matched[going] = matched if going is slots else matched[goes_on]
        self._followed[going] = now
        return length - distance, matched, goes_on

    def find_occurrence(self, slots: Slots, length: I32) -> tuple[I32, I32]:
        """An earlier occurrence of the tokens that end each history.

        The one of the last lookup if that goes on, else the latest one of the longest context.

        ``length``: int32[n], the histories' lengths, at least 1. Returns int32[n], the positions of the
        tokens that followed (0: no context stood before), and int32[n], how many tokens before there match:
        the context's, and all since the occurrence was found first. The last SHORTEST do match; an edited
        copy may have others among them.
        """
        large = length > self._room[slots]
        if np.count_nonzero(large):
            # At a stream's first lookup, and when its length doubles.
            for slot in slots[large].tolist():
                self._catch_up(slot)
        start = self._looked_up[slots]
        grown = length - start
        ends = self._row_starts[slots] + length
        window = self._history.take(ends - self._back)
        entries = self._entries_of(window, slots)
        if self._outputs:
            self._insert(slots, start, grown)
            self._pending[slots] = entries.T
        self._looked_up[slots] = length
        distance = self._distance[slots]
        at = np.concatenate(((length - distance)[None], self._entries.take(entries)))
        at, size = self._verify(at, slots, length, window)
        goes_on = length - at == distance
        matched = size + (self._matched[slots] + length - self._followed[slots] - size) * goes_on
        self._followed[slots] = length
        self._distance[slots] = (length - at) * (at > 0)
        self._matched[slots] = matched
        return at, matched

    def find_one(self, slot: int, length: int) -> tuple[int, int]:
        """:meth:`find_occurrence` for one slot, in a tenth of the time that array operations take for it."""
        if length > self._room[slot] or length - self._looked_up[slot] > MAX_BEHIND:
            self._catch_up(slot)
        start = int(self._looked_up[slot])
        row = self._rows[slot]
        first = max(min(start + 1, length) - LONGEST, 0)
        tokens = row[first:length].tolist()
        known = self._entries.data
        if length > start and self._outputs:
            for entry in self._pending[slot].tolist():
                known[entry] = start
        for end in range(start + 1, length if self._outputs else 0):
            for entry in self._entries_of_one(tokens[: end - first], slot):
                known[entry] = end
        entries = self._entries_of_one(tokens, slot)
        self._pending[slot] = entries
        self._looked_up[slot] = length
        limit = length if self._outputs else self._base[slot]
        distance = int(self._distance[slot])
        found = [length - distance, *(known[entry] for entry in entries)]
        for size, at in zip(_TRIED, found, strict=True):
            if size <= at < limit and row[at - size : at].tolist() == tokens[-size:]:
                if length - at == distance:
                    size = int(self._matched[slot] + length - self._followed[slot])
                self._distance[slot] = length - at
                self._matched[slot], self._followed[slot] = size, length
                return at, size
        self._distance[slot] = 0
        return 0, 0

    def _entries_of_one(self, tokens: list[int], slot: int) -> list[int]:
        """The entries, longest context first, for contexts that end with ``tokens``, of which the last
        LONGEST count. Fewer stand at the start of a history, where no context is found anyway."""
        shift = int(self._shift[slot])
        hashes = [0]
        for factor, token in zip(_FACTOR_INTS, reversed(tokens), strict=False):
            hashes.append((hashes[-1] + factor * token) & 0xFFFFFFFF)
        return [
            table + (hashes[min(size, len(hashes) - 1)] >> shift)
            for size, table in zip(_SIZES, self._tables[:, slot].tolist(), strict=True)
        ]

    def _insert(self, slots: Slots, start: I32, grown: I32) -> None:
        """Insert the contexts that tokens have followed: those that end at ``start``, and up to ``grown - 1``
        tokens behind it."""
        if np.count_nonzero(grown) < len(grown):
            followed = grown > 0
            slots, start, grown = slots[followed], start[followed], grown[followed]
        self._entries[self._pending[slots]] = start[:, None]
        further = grown - 1
        if np.count_nonzero(further):
            of = np.arange(len(slots)).repeat(further)
            ends = (
                np.arange(1, len(of) + 1, dtype=np.int32)
                + (start + further - further.cumsum(dtype=np.int32))[of]
            )
            slots = slots[of]
            window = self._history.take(self._row_starts[slots] + ends - self._back)
            self._entries[self._entries_of(window, slots)] = ends

    def _entries_of(self, window: I32, slots: Slots) -> NDArray[np.intp]:
        """intp[sizes, n]: the entries for contexts whose last tokens, backwards, are int32[LONGEST, n]."""
        hashes = np.add.accumulate(window.view(np.uint32) * self._factors, axis=0, dtype=np.uint32)
        buckets = hashes[: SHORTEST - 2 : -1] >> self._shift[slots]
        return buckets + self._tables.take(slots, axis=1)

    def _verify(self, at: I32, slots: Slots, length: I32, window: I32) -> tuple[I32, I32]:
        """The first of the positions int32[tries, n] that follow the tokens of int32[LONGEST, n]; 0:
        none. And the sizes of contexts."""
        before = self._history.take((self._row_starts[slots] + at) - self._back[:, None])
        matches = ((before == window[:, None]) | self._unused).all(axis=0)
        matches &= at >= self._tried
        matches &= at < (length if self._outputs else self._base[slots])
        longest = matches.argmax(axis=0)
        row = np.arange(len(length))
        found: I32 = at[longest, row] * matches[longest, row]
        size: I32 = self._tried[longest, 0]
        return found, size

    def _catch_up(self, slot: int) -> None:
        """Index a history, in tables of a size that fits."""
        length = int(self._length[slot])
        indexed = length if self._outputs else int(self._base[slot])
        bits = min((max(2 * indexed, FEWEST_BUCKETS) - 1).bit_length(), self._most_bits)
        self._room[slot] = 1 << bits if self._outputs and bits < self._most_bits else _FULL
        self._shift[slot] = 32 - bits
        # Contexts that begin before the history are harmless: no position is that far in front.
        tokens = np.zeros(LONGEST + indexed, np.uint32)
        tokens[LONGEST:] = self._rows[slot, :indexed]
        ends = np.arange(indexed, dtype=np.int32)
        hashes = np.zeros(indexed, np.uint32)
        for size in range(1, LONGEST + 1):
            hashes += tokens[LONGEST - size : -size] * _FACTORS[size - 1]
            if size >= SHORTEST:
                table = self._tables[LONGEST - size, slot]
                self._entries[table + (hashes >> self._shift[slot]).astype(np.intp)] = ends
        self._looked_up[slot] = length


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()
