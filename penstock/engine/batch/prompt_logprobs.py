"""Prompt logprobs: which prompt tokens a step scores, and the rows that carry the result."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.engine.base import StepRows
from penstock.engine.batch.slots import SlotTable
from penstock.wire.logprobs import Logprobs, PromptLogprobs

Slots = NDArray[np.intp]


class PromptLogprobsState:
    """Slots whose request asked for prompt logprobs, and how far each prompt is scored.

    The logits at a token score the token after it, so a step that computes positions a to b of a prompt can
    score positions a + 1 to b + 1. A prompt that is recomputed after preemption is not scored again.
    """

    def __init__(self, table: SlotTable) -> None:
        self.active_slots = 0
        """Slots that want prompt logprobs."""
        self.alternatives = np.full(table.size, -1, np.int32)
        """Candidates wanted beside the prompt's own token; -1: no logprobs."""
        self._table = table
        self._scored = np.zeros(table.size, np.int32)
        """Position of the last scored token; the first token of a prompt, at 0, never has a logprob."""

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
        """Indexes of the tokens of a flat batch whose next token is an unscored prompt token.

        slots, positions: [T], slot and history position of each token.
        """
        following = positions + 1
        due = (self.alternatives[slots] >= 0) & (following > self._scored[slots])
        return np.flatnonzero(due & (following < self._table.base[slots]))

    def rows(self, slots: Slots, positions: NDArray[np.int64], scored: Logprobs) -> StepRows:
        """Rows without tokens, one per stream, with the logprobs of the prompt tokens at ``positions``.

        slots, positions: [P], each slot's tokens together, in order of position; ``scored.token`` indexes
        them. Call it before the step's tokens are settled: these rows come before theirs.
        """
        table = self._table
        first = np.concatenate(([True], slots[1:] != slots[:-1]))
        own = slots[first]
        self._scored[slots] = positions
        return StepRows(
            server=table.server[own],
            stream=table.stream[own],
            position=table.sent[own] - table.base[own],
            tokens=np.zeros(0, np.int32),
            count=np.zeros(len(own), np.int32),
            prompt=PromptLogprobs(
                row=(np.cumsum(first) - 1)[scored.token].astype(np.int32),
                position=positions[scored.token].astype(np.int32),
                ids=scored.ids,
                values=scored.values,
                rank=np.where(scored.continues(), 0, scored.rank).astype(np.int32),
            ),
        )
