"""Settlement: what becomes of a step's tokens, or of a batch that could not be computed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from penstock.engine.base import StepRows
from penstock.engine.batch.rows import concat_rows, empty_rows
from penstock.engine.batch.slots import FAILED
from penstock.engine.sampling.metadata import NO_TOKEN
from penstock.engine.schedule.batch import Batch
from penstock.engine.schedule.running_streams import RunningStreams, Slots
from penstock.engine.schedule.step_cost import StepCost
from penstock.engine.schedule.verification import verify
from penstock.wire.arrays import I8, I32
from penstock.wire.frames import FinishReason
from penstock.wire.logprobs import Logprobs


class Settlement:
    """Appends sampled tokens to their streams, makes rows, and frees the slots of streams that end."""

    def __init__(self, streams: RunningStreams, step_cost: StepCost, clock: Callable[[], float]) -> None:
        self._streams = streams
        self._table = streams.table
        self._sampling = streams.sampling
        self._blocks = streams.blocks
        self._shortage = streams.shortage
        self._step_cost = step_cost
        self._clock = clock
        self._settled_at = 0.0
        self._step_s = 0.0
        """Seconds that the latest step took."""

    def settle(self, batch: Batch, tokens: I32, logprobs: Logprobs | None) -> StepRows:
        """Append the sampled tokens, make the rows that are due, and free the slots of finished streams.

        ``tokens`` int32[rows of ``batch.sampled_rows()``], NO_TOKEN for streams whose constraints exclude
        every token; ``logprobs.token`` indexes them. Batches are settled in the order in which they were
        scheduled; tokens of streams that have left are dropped.
        """
        generated = self._table.generated
        rows = self._update(batch, tokens, logprobs)
        self._record_step_cost(batch)
        if self._streams.speculation is not None and batch.decodes == len(batch):
            self._streams.speculation.observe(
                self._step_s,
                int(batch.count.sum()),
                self._table.generated - generated,
                drafts=batch.drafts is not None,
            )
        return rows

    def _update(self, batch: Batch, tokens: I32, logprobs: Logprobs | None) -> StepRows:
        slots = batch.slots[batch.samples]
        alive = self._table.generation[slots] == batch.generations
        running = slots[alive]
        self._table.in_flight_tokens[running] = np.maximum(self._table.in_flight_tokens[running] - 1, 0)
        if batch.drafts is not None:
            return self._update_runs(slots, batch.drafts, alive, tokens, logprobs)
        sampled = tokens != NO_TOKEN
        no_valid_token = slots[alive & ~sampled]
        alive &= sampled
        if np.count_nonzero(alive) < len(alive):
            slots, tokens = slots[alive], tokens[alive]
            logprobs = None if logprobs is None else logprobs.select_tokens(alive)
        rows = self._append(slots, tokens, logprobs) if len(slots) else empty_rows()
        return concat_rows([rows, self._end_without_token(no_valid_token)]) if len(no_valid_token) else rows

    def _update_runs(
        self,
        slots: Slots,
        drafts: I32,
        alive: NDArray[np.bool_],
        tokens: I32,
        logprobs: Logprobs | None,
    ) -> StepRows:
        """The tokens of ``slots`` of which some have ``drafts``; ``alive``: those whose stream still runs."""
        if np.count_nonzero(alive) < len(alive):
            rows = np.repeat(alive, drafts + 1)
            slots, drafts, tokens = slots[alive], drafts[alive], tokens[rows]
            logprobs = None if logprobs is None else logprobs.select_tokens(rows)
            if not len(slots):
                return empty_rows()
        runs = verify(self._table, self._sampling, slots, drafts, tokens, logprobs)
        # The keys and values of rejected tokens are overwritten. A preempted stream has none any more.
        verified = (drafts > 0) & (self._blocks.block_counts[slots] > 0)
        self._streams.computed[slots[verified]] = (self._table.length[slots] + runs.accepted)[verified]
        self._table.append_runs(slots, runs.tokens, runs.count)
        if self._streams.speculation is not None:
            self._streams.speculation.on_verified(slots, drafts, runs.accepted)
        wanting = self._sampling.logprobs[slots] >= 0
        due, held = self._table.due(slots, runs.finish), None
        if np.count_nonzero(wanting):
            held = self._streams.logprobs_buffer.append_runs_and_take_due(
                slots, runs.count, due, wanting, runs.logprobs
            )
        return self._rows(slots, runs.finish, due, held, runs.broken)

    def _append(self, slots: Slots, tokens: I32, logprobs: Logprobs | None) -> StepRows:
        """Append one token each, make the rows that are due, and free the slots of streams that end."""
        ends = self._table.append_and_check_stop(slots, tokens)
        broken = self._sampling.accept(slots, tokens, ends)
        due = self._table.due(slots, ends)
        if logprobs is not None:
            logprobs = self._streams.logprobs_buffer.append_and_take_due(slots, due, logprobs)
        return self._rows(slots, ends, due, logprobs, broken)

    def _rows(
        self,
        slots: Slots,
        ends: I8,
        due: NDArray[np.bool_],
        logprobs: Logprobs | None,
        broken: dict[int, str],
    ) -> StepRows:
        """The rows that are due; frees the slots of streams that end."""
        rows = self._table.rows(slots, ends, due)
        rows.logprobs = logprobs
        if not np.count_nonzero(ends):
            return rows
        if broken:
            failed = slots[ends == FAILED].tolist()
            rows.failed = [
                self._table.failure(slot, "invalid_request", f"structured output: {broken[slot]}")
                for slot in failed
            ]
        ended = slots[ends != FinishReason.NONE]
        rows.routed = self._streams.take_routes(ended)
        self._streams.free(ended)
        return rows

    def _end_without_token(self, slots: Slots) -> StepRows:
        """End streams whose constraints exclude every token, with the tokens that they held back."""
        ends = np.full(len(slots), FinishReason.GRAMMAR, np.int8)
        wanting = self._sampling.logprobs[slots] >= 0
        logprobs = self._streams.logprobs_buffer.take_due(slots, np.ones(len(slots), np.bool_), wanting)
        rows = self._table.rows(slots, ends)
        rows.logprobs = logprobs
        rows.routed = self._streams.take_routes(slots)
        self._streams.free(slots)
        return rows

    def _record_step_cost(self, batch: Batch) -> None:
        """A step begins when it is scheduled or, if scheduled ahead, when the step before it is settled."""
        now = self._clock()
        seconds = now - max(batch.scheduled_at, self._settled_at)
        self._settled_at, self._step_s = now, seconds
        if batch.pictures:  # no estimate of a token's cost
            return
        chunks = int(batch.count[batch.decodes :].sum()) if batch.decodes < len(batch) else 0
        self._step_cost.observe(seconds, chunks, batch.decodes)

    # -- a batch that cannot be launched

    def running_parts(self, batch: Batch) -> Batch:
        """The parts of a batch that is not launched, without those of streams that have left."""
        left = self._table.generation[batch.slots[batch.samples]] != batch.generations
        return batch.select(np.setdiff1d(np.arange(len(batch)), batch.samples[left]))

    def fail(self, part: Batch, message: str) -> StepRows:
        """End the streams of a batch whose tokens cannot be computed, with rows of those held back."""
        self._streams.computed[part.slots] = part.start
        return self._streams.fail(part.slots, "engine_error", message)

    def set_aside(self, part: Batch, message: str) -> StepRows:
        """Preempt the streams of a batch for which the device has no memory, for others to advance; end
        those that were tried often enough."""
        self._streams.computed[part.slots] = part.start
        given_up = []
        for slot, count, start in zip(part.slots.tolist(), part.count, part.start, strict=True):
            if self._shortage.may_try_again(slot, int(count), int(start + count), self._streams.steps):
                self._streams.preempt(slot)
            else:
                given_up.append(slot)
        return self._streams.fail(np.array(given_up, np.intp), "engine_error", message)
