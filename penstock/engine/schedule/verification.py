"""Which of a step's sampled tokens are output: those up to the first one that its draft does not have."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.engine.batch.slots import SlotTable
from penstock.engine.sampling.metadata import NO_TOKEN, SamplingMetadata
from penstock.engine.schedule.batch import row_offsets
from penstock.wire.arrays import I8, I32
from penstock.wire.frames import FinishReason
from penstock.wire.logprobs import Logprobs

Slots = NDArray[np.intp]


@dataclass(slots=True, kw_only=True)
class VerifiedRuns:
    """Output tokens of n streams: those of a stream next to each other, up to its end if it ends."""

    slots: Slots
    tokens: I32
    """int32[sum of count]"""
    count: I32
    """int32[n]"""
    finish: I8
    """int8[n]: FinishReason, or FAILED."""
    accepted: I32
    """int32[n]: draft tokens that were sampled, too."""
    logprobs: Logprobs | None
    """``token`` indexes ``tokens``."""
    broken: dict[int, str]
    """Errors of streams that failed, by slot."""


def verify(
    table: SlotTable,
    sampling: SamplingMetadata,
    slots: Slots,
    drafts: I32,
    tokens: I32,
    logprobs: Logprobs | None,
) -> VerifiedRuns:
    """Compare sampled tokens with drafts, and apply the finish rules and grammars to those that are output.

    ``drafts`` int32[n]: draft tokens behind each slot's history. ``tokens`` int32[sum of drafts + 1]: the
    tokens sampled after the history and after each draft token, NO_TOKEN where constraints exclude all;
    ``logprobs.token`` indexes them. Advances grammars, and nothing else.
    """
    offset = row_offsets(drafts + 1)
    owner = np.repeat(np.arange(len(slots)), drafts + 1)
    first = np.cumsum(drafts + 1) - drafts - 1
    accepted = _count_accepted(table, slots, drafts, tokens)
    stuck = tokens[first + accepted] == NO_TOKEN
    count: I32 = (accepted + 1 - stuck).astype(np.int32)
    finish = np.zeros(len(slots), np.int8)

    kept = offset < count[owner]
    ends = table.check_stop(
        slots[owner[kept]], tokens[kept], table.length[slots][owner[kept]] + offset[kept] + np.int32(1)
    )
    ending = np.flatnonzero(ends)
    if len(ending):
        rows, at = np.unique(owner[kept][ending], return_index=True)
        finish[rows], count[rows] = ends[ending[at]], offset[kept][ending[at]] + 1
        stuck[rows] = False
        kept = offset < count[owner]
    before = count.copy()
    broken = sampling.accept_runs(slots, tokens[kept], count, finish)
    if (before != count).any():
        kept = offset < count[owner]
    finish[stuck & (finish == FinishReason.NONE)] = FinishReason.GRAMMAR
    return VerifiedRuns(
        slots=slots,
        tokens=tokens[kept],
        count=count,
        finish=finish,
        accepted=accepted,
        logprobs=None if logprobs is None else logprobs.select_tokens(kept),
        broken=broken,
    )


def _count_accepted(table: SlotTable, slots: Slots, drafts: I32, tokens: I32) -> I32:
    """int32[n]: leading tokens of each draft that equal the sampled ones."""
    rows = drafts + 1
    offset = row_offsets(rows)
    position = np.minimum(np.repeat(table.length[slots], rows) + offset, table.max_model_len - 1)
    wrong = table.history[np.repeat(slots, rows), position] != tokens
    wrong |= offset == np.repeat(drafts, rows)
    accepted: I32 = np.minimum.reduceat(np.where(wrong, offset, drafts.max()), np.cumsum(rows) - rows)
    return accepted.astype(np.int32)
