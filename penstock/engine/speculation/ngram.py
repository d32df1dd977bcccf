"""Prompt lookup: what followed the last tokens of a history when they stood in it before."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.engine.batch.slots import SlotTable
from penstock.engine.speculation.history_index import MAX_BUCKETS, NO_DRAFT, HistoryIndex
from penstock.wire.arrays import I32


class NgramProposer:
    """Drafts are copies from the own history: of quotations, edited text and code, and of loops.

    A draft has at most as many tokens as match: over this project's docs, that spares a third of the drafts,
    and a twentieth of those that would have been right.
    """

    def __init__(self, table: SlotTable, *, most_buckets: int = MAX_BUCKETS) -> None:
        self._index = HistoryIndex(table, most_buckets)
        self._length = table.length
        self._rows = table.history
        self._history = table.history.reshape(-1)
        self._width = table.max_model_len

    def begin(self, slot: int, scope: int = 0) -> None:
        self._index.forget(slot)

    def propose(self, slots: NDArray[np.intp], most: I32) -> I32:
        if len(slots) == 1:
            return self._propose_one(int(slots[0]), int(most[0]))
        length = self._length[slots]
        at, matched = self._occurrences(slots, length)
        counts = (np.minimum(most, matched) * (at > 0)).astype(np.int32, copy=False)
        self._index.drafted[slots] = np.where(counts, counts, NO_DRAFT)
        longest = int(counts.max(initial=0))
        if not longest:
            return counts
        ahead = np.arange(longest)
        start = (slots * self._width)[:, None]
        tokens = self._history.take(start + continuation(at, length, ahead))
        places = (start + length[:, None]) + ahead
        if np.count_nonzero(counts != longest):
            written = ahead < counts[:, None]
            self._history[places[written]] = tokens[written]
        else:
            self._history[places] = tokens
        return counts

    def _occurrences(self, slots: NDArray[np.intp], length: I32) -> tuple[I32, I32]:
        """See :meth:`HistoryIndex.find_occurrence`."""
        at, matched, goes_on = self._index.follow(slots, length)
        others = np.flatnonzero(~goes_on)
        if len(others) == len(slots):
            return self._index.find_occurrence(slots, length)
        if len(others):
            at[others], matched[others] = self._index.find_occurrence(slots[others], length[others])
        return at, matched

    def _propose_one(self, slot: int, most: int) -> I32:
        length = int(self._length[slot])
        at, matched = self._index.find_one(slot, length)
        count = min(most, matched)
        self._index.drafted[slot] = NO_DRAFT
        row = self._rows[slot]
        for place in range(length, length + count):  # token by token: a loop repeats what was just written
            row[place] = row[place - length + at]
        return np.full(1, count, np.int32)

    def restart(self, slot: int) -> None:
        """Nothing to do: the history is the same."""

    def reset(self) -> None:
        """There is nothing of earlier streams."""

    def end(self, slot: int) -> None:
        """Nothing to do: the slot's next stream begins."""


def continuation(at: I32, length: I32, ahead: NDArray[np.intp]) -> NDArray[np.intp]:
    """intp[n, drafts]: positions in histories of what follows position ``at`` by ``ahead`` tokens. Behind the
    end of a history, what follows repeats what is between ``at`` and there."""
    period = (length - at).astype(np.intp)
    if int(period.min()) <= int(ahead[-1]):
        ahead = ahead % period[:, None]
    return ahead + at[:, None]
