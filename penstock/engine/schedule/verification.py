"""Which of a step's sampled tokens are output: those up to the first one that its draft does not have."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.engine.batch.slots import SlotTable
from penstock.engine.sampling.metadata import NO_TOKEN, SamplingFeature, SamplingMetadata
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
    rows = drafts + np.int32(1)
    width = int(rows.max())
    ahead = np.arange(width, dtype=np.int32)
    is_row = None if len(tokens) == width * len(slots) else ahead < rows[:, None]
    sampled = tokens.reshape(-1, width) if is_row is None else _as_grid(tokens, rows, ahead)
    length = table.length[slots]
    accepted = _count_accepted(table, slots, length, drafts, sampled)
    no_valid_token = sampled[np.arange(len(slots)), accepted] == NO_TOKEN
    count: I32 = accepted + np.int32(1) - no_valid_token

    kept = ahead < count[:, None]
    finish = np.zeros(len(slots), np.int8)
    ends = table.check_stop(slots[:, None], sampled, length[:, None] + ahead + np.int32(1))
    if np.count_nonzero(ends):
        ends *= kept
        ending = np.flatnonzero(ends.any(axis=1))
        first = (ends[ending] != FinishReason.NONE).argmax(axis=1)
        finish[ending], count[ending] = ends[ending, first], first + 1
        no_valid_token[ending] = False
        kept = ahead < count[:, None]
    broken: dict[int, str] = {}
    if np.count_nonzero(sampling.needs[slots] & SamplingFeature.GRAMMAR):
        broken = sampling.accept_runs(slots, sampled[kept], count, finish)
        kept = ahead < count[:, None]
    finish[no_valid_token & (finish == FinishReason.NONE)] = FinishReason.GRAMMAR
    if logprobs is not None:
        logprobs = logprobs.select_tokens(kept.reshape(-1) if is_row is None else kept[is_row])
    return VerifiedRuns(
        slots=slots,
        tokens=tokens if int(count.sum()) == len(tokens) else sampled[kept],
        count=count,
        finish=finish,
        accepted=accepted,
        logprobs=logprobs,
        broken=broken,
    )


def _as_grid(tokens: I32, rows: I32, ahead: I32) -> I32:
    """int32[n, W]: ``rows`` int32[n] tokens of each stream, and others behind them."""
    grid: I32 = tokens.take((np.cumsum(rows) - rows)[:, None] + ahead, mode="clip")
    return grid


def _count_accepted(table: SlotTable, slots: Slots, length: I32, drafts: I32, sampled: I32) -> I32:
    """int32[n]: leading tokens of each draft that equal the sampled ones, int32[n, W]."""
    ahead = np.arange(sampled.shape[1], dtype=np.int32)
    places = (slots * table.max_model_len + length)[:, None] + ahead
    wrong = table.history.reshape(-1).take(places, mode="clip") != sampled
    wrong |= ahead >= drafts[:, None]
    accepted: I32 = wrong.argmax(axis=1).astype(np.int32)
    return accepted
