"""Which prompt tokens get logprobs in a step, and the rows that carry them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.engine.base import StepRows
from penstock.engine.batch.slots import SlotTable
from penstock.wire.arrays import F32, I32
from penstock.wire.logprobs import PromptLogprobs

Slots = NDArray[np.intp]


class PromptLogprobsState:
    """Slots whose request asked for logprobs of its prompt, and how far they are made.

    The logits at a token are those of the token after it, so a step that computes a chunk of a prompt can
    score the chunk moved on by one. A prompt that is computed again is not scored again.
    """

    def __init__(self, table: SlotTable) -> None:
        self.active_slots = 0
        """Slots that want logprobs of their prompt."""
        self.alternatives = np.full(table.size, -1, np.int32)
        """Candidates beside the prompt's own token; -1: no logprobs."""
        self._table = table
        self._scored = np.zeros(table.size, np.int32)
        """Place of the last token that has its logprobs; the first token of a prompt, at 0, never has any."""

    def set(self, slot: int, alternatives: int) -> None:
        self.clear(slot)
        if alternatives >= 0:
            self.alternatives[slot] = alternatives
            self._scored[slot] = 0
            self.active_slots += 1

    def clear(self, slot: int) -> None:
        if self.alternatives[slot] >= 0:
            self.alternatives[slot] = -1
            self.active_slots -= 1

    def tokens_to_score(self, slots: Slots, positions: NDArray[np.int64]) -> NDArray[np.intp]:
        """Which tokens of a flat batch are followed by a prompt token that is to be scored.

        slots, positions: [T], slot and history position of each token.
        """
        place = positions + 1
        due = (self.alternatives[slots] >= 0) & (place > self._scored[slots])
        return np.flatnonzero(due & (place < self._table.base[slots]))

    def rows(self, slots: Slots, places: NDArray[np.int64], ids: I32, values: F32, rank: I32) -> StepRows:
        """Rows without tokens, one per stream, that carry the logprobs of the prompt tokens at ``places``.

        ``slots``: [P], each slot's entries together, in order of their places. Called before the tokens of
        the step are settled: the rows come before theirs.
        """
        table = self._table
        first = np.concatenate(([True], slots[1:] != slots[:-1]))
        own = slots[first]
        self._scored[slots] = places
        return StepRows(
            table.server[own],
            table.stream[own],
            table.sent[own] - table.base[own],
            np.zeros(0, np.int32),
            np.zeros(len(own), np.int32),
            prompt=PromptLogprobs(
                (np.cumsum(first) - 1).astype(np.int32), places.astype(np.int32), ids, values, rank
            ),
        )
