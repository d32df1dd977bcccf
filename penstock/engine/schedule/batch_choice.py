"""The choice of a step's tokens: decodes, drafts, and chunks of prompts.

Each stream that has finished prefill decodes one token per step, and verifies a draft of more if it has one;
the rest of ``max_num_batched_tokens`` goes to chunks of prompts. When decodes need more blocks than are free,
the least important stream, among equals the one admitted last, is preempted.
"""

from __future__ import annotations

import logging
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from penstock.engine.sampling.metadata import NOT_COUNTED
from penstock.engine.schedule.admission import SlotAdmission
from penstock.engine.schedule.batch import Batch
from penstock.engine.schedule.running_streams import RunningStreams, Slots
from penstock.engine.schedule.step_cost import StepCost
from penstock.logging_setup import RateLimitedLog
from penstock.wire.arrays import I32

_log_fault = RateLimitedLog(logging.getLogger(__name__), logging.ERROR)


class BatchChoice:
    """Chooses each step's tokens, and allocates their blocks."""

    def __init__(self, streams: RunningStreams, admission: SlotAdmission, step_cost: StepCost) -> None:
        self._streams = streams
        self._table = streams.table
        self._sampling = streams.sampling
        self._blocks = streams.blocks
        self._prefix_cache = streams.prefix_cache
        self._shortage = streams.shortage
        self._admission = admission
        self._step_cost = step_cost
        self._last_step = np.zeros(streams.table.size, np.int64)
        """By slot: the number of the latest step that had its tokens."""

    def choose(self, now: float) -> Batch:
        """Choose a step's tokens and allocate their blocks. They count as computed from here on.
        ``now``: seconds on the scheduler's clock."""
        self._streams.steps += 1
        self._shortage.begin_step(self._streams.steps)
        self._admission.release_held()
        media = self._streams.media
        span = 0 if media is None else media.wanted
        decodes = self._decodes(self._shortage.step_tokens - span)
        drafts = None if span else self._draft(decodes)
        if media is not None:
            media.begin_step(len(decodes))
        decode_count = np.ones(len(decodes), np.int32) if drafts is None else drafts + 1
        budget = self._prefill_budget(len(decodes), int(decode_count.sum()))
        chunks, counts = self._prefills(max(budget, span), whole_span=span > 0)
        slots, count = decodes, decode_count
        kind = count > 1
        if len(chunks):
            slots, count = np.concatenate((decodes, chunks)), np.concatenate((count, counts))
            kind = np.concatenate((decode_count > 1, 2 * (counts > 1)))
        order = np.lexsort((self._streams.computed[slots], kind))
        slots, count = slots[order], count[order]
        start = self._streams.computed[slots]
        self._streams.computed[slots] = start + count
        self._last_step[slots] = self._streams.steps
        drafted = np.zeros(len(slots), np.int32) if drafts is None else self._drafted(order, drafts)
        samples = (start + count - drafted == self._streams.ahead(slots)).nonzero()[0]
        singles = int(np.count_nonzero(count == 1))
        return Batch(
            slots=slots,
            start=start,
            count=count,
            singles=singles,
            decodes=singles + (0 if drafts is None else int(np.count_nonzero(drafts))),
            samples=samples,
            generations=self._table.generation[slots[samples]],
            drafts=None if drafts is None else drafted[samples],
            prompts=chunks,
            pictures=0 if media is None else media.planned,
            scheduled_at=now,
        )

    def _drafted(self, order: NDArray[np.intp], drafts: I32) -> I32:
        """int32[parts]: draft tokens of the parts in their order, of which the first ones decode."""
        drafted: I32 = np.concatenate((drafts, np.zeros(len(order) - len(drafts), np.int32)))[order]
        return drafted

    def mark_launched(self, batch: Batch) -> None:
        """The batch is running; its sampled tokens are on the device until it is settled."""
        self._table.in_flight_tokens[batch.slots[batch.samples]] += 1
        for slot in batch.prompts.tolist():
            self._prefix_cache.mark_computed(slot, int(self._streams.computed[slot]))
        if self._shortage:
            self._shortage.on_launched(self._streams.computed, self._streams.steps)

    # -- decodes and drafts

    def _decodes(self, most: int) -> Slots:
        """At most ``most`` slots that decode one token; allocates blocks for these tokens, preempting streams
        if needed."""
        slots = self._streams.admitted
        ahead = self._streams.ahead(slots)
        one = (ahead - self._streams.computed[slots] == 1) & (ahead < self._table.end[slots])
        one &= self._blocks.block_counts[slots] > 0
        if self._streams.speculation is not None:
            self._streams.speculation.plan(slots)
        unread = self._table.in_flight_tokens[slots] > 0
        if np.count_nonzero(unread):
            one &= ~(unread & self._reads_history(slots))
        decodes: Slots = slots[one]
        if len(decodes) > most:  # those that have waited longest
            turn = np.argsort(self._last_step[decodes], kind="stable")
            decodes = decodes[turn[: max(0, most)]]
        missing = self._blocks.missing(decodes, self._streams.ahead(decodes))
        if not np.count_nonzero(missing):
            return decodes
        while int(missing.sum()) > self._blocks.free_count():
            victim = self._streams.preempt_last()
            kept = decodes != victim
            decodes, missing = decodes[kept], missing[kept]
        self._blocks.allocate(decodes, missing)
        return decodes

    def _reads_history(self, slots: Slots) -> NDArray[np.bool_]:
        """bool[n]: slots whose next step needs all their tokens on the host. They skip a step that is
        scheduled before the last one is read; the others do not wait for them."""
        reads = self._sampling.reads_history(slots)
        if self._streams.speculation is not None:
            reads |= self._streams.speculation.limit[slots] > 0
        return reads

    def _draft(self, decodes: Slots) -> I32 | None:
        """int32[n]: number of draft tokens behind each history of ``decodes``, which have blocks; None: there
        are none. Drafts never preempt a stream."""
        if self._streams.speculation is None or self._streams.speculation.is_idle or not len(decodes):
            return None
        length = self._table.length[decodes]
        most = np.minimum(self._streams.speculation.limit[decodes], self._table.end[decodes] - length - 1)
        most[self._table.in_flight_tokens[decodes] > 0] = 0
        if self._shortage:
            most = np.minimum(most, self._shortage.most_tokens(decodes) - 1)
        budget = self._shortage.step_tokens - len(decodes)
        if len(decodes) < len(self._streams.admitted) or self._admission.has_newcomers():
            budget //= 2  # prompts wait
        most = np.clip(budget - (np.cumsum(most, dtype=np.int32) - most), 0, most)
        if not np.count_nonzero(most):
            return None
        missing = self._blocks.missing(decodes, length + most)
        if np.count_nonzero(missing):
            fits = np.cumsum(missing) <= self._blocks.free_count()
            most[~fits], missing[~fits] = 0, 0
            self._blocks.allocate(decodes, missing)
        try:
            drafts = self._streams.speculation.propose(decodes, most)
        except Exception:  # noqa: BLE001 - what drafts are made from may be one stream's; all do without
            _log_fault("drafts", "a step has no drafts", exc_info=True)
            self._sampling.counted[decodes] = NOT_COUNTED
            return None
        if self._streams.media is not None and self._streams.media.spans:
            drafts = self._streams.media.cut_drafts(decodes, drafts)
        return drafts if np.count_nonzero(drafts) else None

    # -- chunks of prompts

    def _prefill_budget(self, decodes: int, tokens: int) -> int:
        """Prompt tokens that may be computed beside ``decodes`` decodes, which have ``tokens`` tokens."""
        if decodes == len(self._streams.admitted) and not self._admission.has_newcomers():
            return 0  # there is no prompt to compute
        budget = self._shortage.step_tokens - tokens
        return self._step_cost.allowed(budget, decodes) if decodes else budget

    def _prefills(self, budget: int, *, whole_span: bool) -> tuple[Slots, I32]:
        """Chunked prefill: slots and token counts, up to ``budget`` tokens in total; begun prompts first.
        ``whole_span``: a span waits for a step that computes all of it, whatever memory is short."""
        media = self._streams.media
        chosen: list[int] = []
        counts: list[int] = []
        for slot in chain(self._started_prefills(), self._admission.begin_streams()) if budget else ():
            most = budget
            if self._shortage and not whole_span:
                most = min(budget, self._shortage.most_tokens_of(slot))
            start = int(self._streams.computed[slot])
            count = min(int(self._table.length[slot]) - start, most)
            if media is not None and not (count := media.fit(slot, start, count)):
                continue  # it waits for a picture
            chosen.append(slot)
            counts.append(count)
            budget -= count
            if not budget:
                break
        return np.array(chosen, np.intp), np.array(counts, np.int32)

    def _started_prefills(self) -> list[int]:
        slots = self._streams.admitted
        pending = self._table.length[slots] - self._streams.computed[slots]
        begun: list[int] = slots[(pending > 1) & (self._blocks.block_counts[slots] > 0)].tolist()
        return begun
