"""The tokens that a step computes, and the rows of logits that it samples."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from penstock.wire.arrays import I32

Slots = NDArray[np.intp]


@dataclass(slots=True, frozen=True, kw_only=True)
class SampledRows:
    """Rows of logits to sample, those of a part next to each other. R rows."""

    slots: Slots
    """intp[R]"""
    length: I32
    """int32[R]: length of the history that each row's token follows; drafts before it count as history."""
    token: NDArray[np.intp]
    """intp[R]: index of the row's token in the flat batch."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Batch:
    """The tokens that one step computes: B parts, each ``count`` tokens from position ``start`` of a slot.

    Parts are in this order: ``singles`` parts of one token, sorted by ``start``; decodes with a draft, whose
    tokens are the last one of the history and the draft; chunks of prompts.
    """

    slots: Slots
    start: I32
    count: I32
    singles: int
    decodes: int
    """Parts that are not chunks of prompts, except chunks of one token: ``singles`` and those with drafts."""
    samples: NDArray[np.intp]
    """Indexes of the parts that reach the end of their history: a next token is sampled for these."""
    generations: NDArray[np.int64]
    """int64[len(samples)]: ``SlotTable.generation`` of these slots, to recognise streams that have left."""
    drafts: I32 | None = None
    """int32[len(samples)]: draft tokens of these parts, which are behind the slots' histories; None: no part
    has any."""
    prompts: Slots = field(default_factory=lambda: np.zeros(0, np.intp))
    """Slots of chunks of prompts: other streams may share their blocks once the batch is launched."""
    pictures: int = 0
    """How many are encoded for it."""
    scheduled_at: float = 0.0
    """Seconds on the scheduler's clock."""

    def __len__(self) -> int:
        return len(self.slots)

    def select(self, parts: NDArray[np.intp]) -> Batch:
        """A batch of some of the parts, whose indexes ascend."""
        sampled = np.isin(self.samples, parts)
        drafts = None if self.drafts is None else self.drafts[sampled]
        return replace(
            self,
            slots=self.slots[parts],
            start=self.start[parts],
            count=self.count[parts],
            singles=int(np.count_nonzero(parts < self.singles)),
            decodes=int(np.count_nonzero(parts < self.decodes)),
            samples=np.searchsorted(parts, self.samples[sampled]),
            generations=self.generations[sampled],
            drafts=drafts if drafts is not None and drafts.any() else None,
            prompts=self.prompts[np.isin(self.prompts, self.slots[parts])],
        )

    def count_sampled(self) -> int:
        """Rows of :meth:`sampled_rows`."""
        return len(self.samples) if self.drafts is None else len(self.samples) + int(self.drafts.sum())

    def sampled_rows(self) -> SampledRows:
        """One row for each sampled part, and one for each draft token."""
        part = self.samples
        token = np.cumsum(self.count, dtype=np.intp)[part] - 1
        slots, length = self.slots[part], self.start[part] + self.count[part]
        if self.drafts is None:
            return SampledRows(slots=slots, length=length, token=token)
        rows = self.drafts + 1
        before = row_offsets(rows) - np.repeat(self.drafts, rows)
        return SampledRows(
            slots=np.repeat(slots, rows),
            length=np.repeat(length, rows) + before,
            token=np.repeat(token, rows) + before,
        )


def row_offsets(count: I32) -> I32:
    """int32[sum of count]: 0 to count - 1 for each entry."""
    ends = np.cumsum(count, dtype=np.int32)
    offsets: I32 = np.arange(ends[-1] if len(ends) else 0, dtype=np.int32) - np.repeat(ends - count, count)
    return offsets


EMPTY = Batch(
    slots=np.zeros(0, np.intp),
    start=np.zeros(0, np.int32),
    count=np.zeros(0, np.int32),
    singles=0,
    decodes=0,
    samples=np.zeros(0, np.intp),
    generations=np.zeros(0, np.int64),
)
"""The batch of a step that computes nothing."""
