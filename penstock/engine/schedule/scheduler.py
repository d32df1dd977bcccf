"""The scheduler: continuous batching with chunked prefill, preemption and prefix caching.

Three parts share the streams that have a slot (:mod:`~penstock.engine.schedule.running_streams`): admission
lets waiting streams begin, the choice of a batch gives each step its tokens, and settlement appends what was
sampled. Cached prefixes are not recomputed (:mod:`penstock.engine.schedule.prefix_cache`). When the device
has no memory for a batch, steps are smaller for a while
(:mod:`penstock.engine.schedule.device_memory_shortage`). State is arrays over slots, without tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from penstock.config.serve import ServeConfig
from penstock.engine.base import Hold, StepRows
from penstock.engine.batch.rows import concat_rows
from penstock.engine.batch.slots import SlotTable
from penstock.engine.kv_events.block_log import BlockLog
from penstock.engine.lora.adapter_table import AdapterTable
from penstock.engine.sampling.metadata import SamplingMetadata
from penstock.engine.schedule.adapter_room import AdapterRoom
from penstock.engine.schedule.admission import SlotAdmission
from penstock.engine.schedule.batch import EMPTY, Batch
from penstock.engine.schedule.batch_choice import BatchChoice
from penstock.engine.schedule.block_tables import BlockTables
from penstock.engine.schedule.device_memory_shortage import MemoryShortage
from penstock.engine.schedule.prefix_cache import PrefixCache
from penstock.engine.schedule.running_streams import RunningStreams
from penstock.engine.schedule.settlement import Settlement
from penstock.engine.schedule.step_cost import StepCost
from penstock.engine.speculation.speculation import Speculation
from penstock.wire.arrays import I32
from penstock.wire.frames import FinishReason
from penstock.wire.logprobs import Logprobs
from penstock.wire.messages import Submit


class Scheduler:
    """Chooses each step's tokens, and assigns slots and blocks to streams."""

    def __init__(
        self,
        table: SlotTable,
        sampling: SamplingMetadata,
        blocks: BlockTables,
        config: ServeConfig,
        clock: Callable[[], float] = time.monotonic,
        block_log: BlockLog | None = None,
        adapters: AdapterTable | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """``adapters``: the engine's; None: it runs none. ``speculation`` makes drafts; None: no drafts."""
        self.table = table
        self.blocks = blocks
        self.adapters = adapters
        self.prefix_cache = PrefixCache(table, blocks, enabled=config.enable_prefix_caching, log=block_log)
        self.step_cost = StepCost(config.max_prefill_delay, blocks.block_size)
        self.shortage = MemoryShortage(config.max_num_batched_tokens)
        self.adapter_room = None if adapters is None else AdapterRoom(table.size, config.max_loras)
        self.streams = RunningStreams(
            table, sampling, blocks, self.prefix_cache, self.shortage, self.adapter_room, speculation
        )
        self._admission = SlotAdmission(self.streams, config, adapters)
        self._queue = self._admission.queue
        self._choice = BatchChoice(self.streams, self._admission, self.step_cost)
        self._settlement = Settlement(self.streams, self.step_cost, clock)
        self._clock = clock
        self.take_pictures = self.streams.take_pictures
        self._aborted: dict[int, None] = {}
        """Slots of aborted streams."""
        self._hold = Hold.NOTHING

    # -- streams come and go

    def submit(self, server: int, request: Submit) -> None:
        """Queue a stream. Raises RequestRejected when it could never finish or the queue is full, WireError
        when its handle is in use."""
        self._admission.submit(server, request)

    def abort(self, server: int, streams: Sequence[int]) -> None:
        """Stop streams; ``take_aborted`` returns their ends. Unknown ones are ignored."""
        for stream in streams:
            if self._queue.abort(server, stream):
                continue
            slot = self.table.find_slot(server, stream)
            if slot is not None:
                self._aborted[slot] = None

    def take_aborted(self) -> StepRows:
        """The ends of aborted streams, with all that they held back, of streams that failed in the queue, and
        of those whose pictures will not come; frees their slots."""
        media = self.streams.media
        parts = [self._admission.settle_pages()] if media is not None and media.pages.is_pending else []
        if self._queue.has_finished():
            parts.append(self._queue.take_finished())
        if self._aborted:
            slots = np.fromiter(self._aborted, np.intp)
            held = self.streams.take_held_logprobs(slots)
            parts.append(self.table.rows(slots, np.full(len(slots), FinishReason.ABORT, np.int8)))
            parts[-1].logprobs = held
            parts[-1].routed = self.streams.take_routes(slots)
            self.streams.free(slots)
            self._aborted = {}
        return concat_rows(parts)

    def drop_server(self, server: int) -> None:
        """Forget an API server's streams."""
        self._queue.drop_server(server)
        slots = self.table.slots_of(server)
        for slot in slots:
            self._aborted.pop(slot, None)
        self.streams.free(np.array(slots, np.intp))
        if self.streams.media is not None:
            self.streams.media.pages.drop_server(server)

    def fail_all(self, code: str, message: str) -> StepRows:
        """End every stream with an error, with rows of the tokens that were held back."""
        rows = self.streams.fail(self.streams.admitted, code, message)
        rows.failed = [*rows.failed, *self._queue.fail_all(code, message)]
        self._aborted = {}
        return rows

    def hold(self, hold: Hold) -> None:
        """Hold streams back from the next step on."""
        self._hold = hold
        self._admission.takes_newcomers = hold is Hold.NOTHING

    def flush(self) -> StepRows:
        """Rows of all tokens that were held back; the streams go on."""
        return self.streams.flush()

    def preempt_all(self) -> None:
        """Free the blocks of all streams, whose histories are computed again. No batch is in flight."""
        slots = self.streams.admitted
        for slot in slots[self.blocks.block_counts[slots] > 0].tolist():
            self.streams.preempt(slot)

    def reset_caches(self) -> None:
        """Forget cached blocks, and earlier outputs that drafts come from."""
        self.prefix_cache.reset()
        if self.streams.speculation is not None:
            self.streams.speculation.reset()
        if self.streams.media is not None:
            self.streams.media.clear()

    # -- state

    def has_work(self) -> bool:
        """Whether a stream waits, runs, or has an end to report."""
        return bool(len(self.streams.admitted) or self._queue or self._queue.has_finished())

    def can_step(self) -> bool:
        """Whether a step would do anything: what is held back does not count."""
        if self._aborted or self._queue.has_finished() or self._hold is Hold.NOTHING:
            return self.has_work()
        return self._hold is Hold.NEWCOMERS and bool(len(self.streams.admitted))

    def waiting(self) -> int:
        """Streams without a slot."""
        return len(self._queue)

    def deferred(self) -> int:
        """Waiting streams that could not begin even if there were room."""
        return self._queue.held_count()

    def running(self) -> int:
        """Streams with a slot."""
        return len(self.streams.admitted)

    def metrics(self) -> dict[str, float]:
        """Counters since the start, as :meth:`penstock.engine.base.Engine.metrics` names them."""
        counters: dict[str, float] = {
            "preemptions_total": self.streams.preemptions,
            "prefix_cache_queries_total": self.prefix_cache.queries,
            "prefix_cache_hits_total": self.prefix_cache.hits,
        }
        for part in (self.streams.speculation, self.streams.media):
            if part is not None:
                counters |= part.metrics()
        return counters

    # -- a step

    @property
    def max_batched_tokens(self) -> int:
        """Maximum tokens of a step."""
        return self.shortage.step_tokens

    def schedule(self) -> Batch:
        """Choose a step's tokens and allocate their blocks. They count as computed from here on."""
        if self._hold is Hold.ALL:
            return EMPTY
        return self._choice.choose(self._clock())

    def mark_launched(self, batch: Batch) -> None:
        """The batch is running; its sampled tokens are on the device until it is settled."""
        self._choice.mark_launched(batch)

    def update_from_output(self, batch: Batch, tokens: I32, logprobs: Logprobs | None) -> StepRows:
        """Append the sampled tokens, make the rows that are due, and free the slots of finished streams:
        :meth:`Settlement.settle`."""
        return self._settlement.settle(batch, tokens, logprobs)

    # -- a batch that cannot be launched

    def running_parts(self, batch: Batch) -> Batch:
        """The parts of a batch that is not launched, without those of streams that have left."""
        return self._settlement.running_parts(batch)

    def fail(self, part: Batch, message: str) -> StepRows:
        """End the streams of a batch whose tokens cannot be computed, with rows of those held back."""
        return self._settlement.fail(part, message)

    def set_aside(self, part: Batch, message: str) -> StepRows:
        """Preempt the streams of a batch for which the device has no memory, for others to advance; end
        those that were tried often enough."""
        return self._settlement.set_aside(part, message)

    def shrink_steps(self, tokens: int) -> None:
        """Make steps smaller: of a batch that had no memory the largest part that ran has ``tokens``."""
        self.shortage.shrink(tokens, self.streams.steps)
