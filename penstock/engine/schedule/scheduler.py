"""The scheduler: continuous batching with chunked prefill, preemption and prefix caching.

Streams are admitted in the order of the waiting queue, when a slot is free and the KV cache has room for the
whole prompt. Each sequence that has finished prefill decodes one token per step, and verifies a draft of more
if it has one (:mod:`penstock.engine.speculation.speculation`); the rest of ``max_num_batched_tokens`` goes to
chunks of prompts. When decodes need more blocks than are free, the least
important stream, among equals the one admitted last, is preempted: its blocks are freed, it keeps its slot
and its history, and the history is prefilled again when there is room. Cached prefixes are not recomputed
(:mod:`penstock.engine.schedule.prefix_cache`). When the device has no memory for a batch, steps are smaller
for a while (:mod:`penstock.engine.schedule.memory_shortage`). State is arrays over slots, without tensors.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from penstock.config.serve import ServeConfig
from penstock.engine.base import RequestRejected, StepRows
from penstock.engine.batch.logprobs import LogprobsBuffer
from penstock.engine.batch.rows import concat_rows, empty_rows
from penstock.engine.batch.slots import FAILED, SlotTable
from penstock.engine.kv_events.block_log import BlockLog
from penstock.engine.lora.adapter_table import AdapterTable, LoadedAdapter, adapter_of
from penstock.engine.sampling.grammar_compiler import Compilation, State
from penstock.engine.sampling.metadata import (
    NO_TOKEN,
    NOT_COUNTED,
    READS_LAST_TOKEN,
    SamplingFeature,
    SamplingMetadata,
)
from penstock.engine.schedule.adapter_room import AdapterRoom
from penstock.engine.schedule.batch import Batch
from penstock.engine.schedule.block_tables import BlockTables
from penstock.engine.schedule.cache_scope import CacheScope
from penstock.engine.schedule.memory_shortage import MemoryShortage
from penstock.engine.schedule.prefix_cache import Match, Prefix, PrefixCache
from penstock.engine.schedule.step_cost import StepCost
from penstock.engine.schedule.submit_checks import check_request
from penstock.engine.schedule.verification import verify
from penstock.engine.schedule.waiting_queue import WaitingQueue, WaitingStream
from penstock.engine.speculation.speculation import Speculation
from penstock.logging_setup import RateLimitedLog
from penstock.wire.arrays import I8, I32
from penstock.wire.frames import FinishReason
from penstock.wire.logprobs import Logprobs
from penstock.wire.messages import Submit, WireError

Slots = NDArray[np.intp]

_log_fault = RateLimitedLog(logging.getLogger(__name__), logging.ERROR)

GRAMMAR_ROOM = "room for a grammar"
"""What streams wait for whose grammar's text is too long beside those of the running streams."""
MAX_HELD_PER_STEP = 128
"""Waiting streams that a step may find unable to start yet: their grammar is being compiled, or another
stream is computing their prefix, or other adapters run. They are held, and the next step looks at those
behind them."""


class Scheduler:
    """Chooses each step's tokens; owns the waiting queue, and assigns slots and blocks to streams."""

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
        self.sampling = sampling
        self.blocks = blocks
        self.logprobs_buffer = LogprobsBuffer(table)
        self.prefix_cache = PrefixCache(table, blocks, enabled=config.enable_prefix_caching, log=block_log)
        self.step_cost = StepCost(config.max_prefill_delay, blocks.block_size)
        self.shortage = MemoryShortage(config.max_num_batched_tokens)
        self.computed = np.zeros(table.size, np.int32)
        """Tokens of each slot's history whose keys and values are in the KV cache after the last step."""
        self.priority = np.zeros(table.size, np.int64)
        self._last_step = np.zeros(table.size, np.int64)
        self._admitted = np.zeros(0, np.intp)
        """Slots in use: the most important priority first, then in order of admission."""
        self._queue = WaitingQueue(config, self._withdraw_compilation)
        self.speculation = speculation
        self.adapters = adapters
        self.adapter_room = None if adapters is None else AdapterRoom(table.size, config.max_loras)
        self._has_freed_grammar = False
        """Whether a stream with a grammar has left since the last step."""
        self._aborted: dict[int, None] = {}
        """Slots of aborted streams."""
        self._clock = clock
        self._settled_at = 0.0
        self._step_s = 0.0
        """Seconds that the latest step took."""

        # -- counters
        self.steps = 0
        self.preemptions = 0

    # -- streams come and go

    def submit(self, server: int, request: Submit) -> None:
        """Queue a stream. Raises RequestRejected when it could never finish or the queue is full, WireError
        when its handle is in use."""
        if self.table.find(server, request.stream) is not None:
            raise WireError(f"Submit.stream {request.stream} is running already")
        check_request(request, self.table.max_model_len, self.sampling.vocab_size)
        adapter = adapter_of(request, self.adapters)
        self._check_capacity(request)
        self.sampling.check(request.sampling)
        compilation = None
        if request.sampling.grammar is not None:
            compilation = self.sampling.grammars.request(server, request.sampling.grammar)
        try:
            free = self.table.free_count()
            self._queue.push(server, request, free, adapter).compilation = compilation
        except ValueError:
            if compilation is not None:
                self.sampling.grammars.withdraw(compilation)
            raise

    def _withdraw_compilation(self, waiting: WaitingStream) -> None:
        if waiting.compilation is not None:
            self.sampling.grammars.withdraw(waiting.compilation)

    def _check_capacity(self, request: Submit) -> None:
        base = len(request.prompt) // 4 - request.resumed
        end = min(base + request.sampling.max_tokens, self.table.max_model_len)
        capacity = self.blocks.blocks * self.blocks.block_size
        if end - 1 > capacity:  # the last token is never read back
            raise RequestRejected(
                f"prompt and max_tokens: {base} + {end - base} tokens do not fit the KV cache, "
                f"which holds {capacity}; ask for fewer tokens or serve with more --kv-cache-memory"
            )

    def abort(self, server: int, streams: Sequence[int]) -> None:
        """Stop streams; ``take_aborted`` returns their ends. Unknown ones are ignored."""
        for stream in streams:
            if self._queue.abort(server, stream):
                continue
            slot = self.table.find(server, stream)
            if slot is not None:
                self._aborted[slot] = None

    def take_aborted(self) -> StepRows:
        """The ends of aborted streams, with their held tokens, and of streams that failed in the queue; frees
        their slots."""
        parts = []
        if self._queue.has_finished():
            parts.append(self._queue.take_finished())
        if self._aborted:
            slots = np.fromiter(self._aborted, np.intp)
            parts.append(self.table.rows(slots, np.full(len(slots), FinishReason.ABORT, np.int8)))
            self._free(slots)
            self._aborted = {}
        return concat_rows(parts)

    def drop_server(self, server: int) -> None:
        """Forget an API server's streams."""
        self._queue.drop_server(server)
        slots = self.table.slots_of(server)
        for slot in slots:
            self._aborted.pop(slot, None)
        self._free(np.array(slots, np.intp))

    def fail_all(self, code: str, message: str) -> StepRows:
        """End every stream with an error, with rows of the tokens that were held back."""
        rows = self._fail(self._admitted, code, message)
        rows.failed = [*rows.failed, *self._queue.fail_all(code, message)]
        self._aborted = {}
        return rows

    def _fail(self, slots: Slots, code: str, message: str) -> StepRows:
        wanting = self.sampling.logprobs >= 0
        for slot in slots.tolist():
            self._clear(slot)
        self._admitted = self._admitted[~np.isin(self._admitted, slots)]
        return self.table.fail(
            slots, code, message, lambda held: self.logprobs_buffer.take_held(held, wanting)
        )

    def reset_caches(self) -> None:
        """Forget cached blocks, and earlier outputs that drafts come from."""
        self.prefix_cache.reset()
        if self.speculation is not None:
            self.speculation.reset()

    def _free(self, slots: Slots) -> None:
        for slot in slots.tolist():
            self._clear(slot)
            self.table.release(slot)
        stays = np.ones(self.table.size, np.bool_)
        stays[slots] = False
        self._admitted = self._admitted[stays[self._admitted]]

    def _clear(self, slot: int) -> None:
        self._release_blocks(slot, forever=True)
        self._has_freed_grammar |= bool(self.sampling.needs[slot] & SamplingFeature.GRAMMAR)
        if self.adapter_room is not None:
            self.adapter_room.end(slot)
        if self.speculation is not None:
            self.speculation.end(slot)
        self.shortage.forget(slot)
        self.sampling.clear(slot)

    def _release_blocks(self, slot: int, *, forever: bool) -> None:
        read = min(int(self.computed[slot]), int(self.table.length[slot]))
        self.prefix_cache.release(slot, read, forever=forever)

    # -- state

    def has_work(self) -> bool:
        return bool(len(self._admitted) or self._queue or self._queue.has_finished())

    def waiting(self) -> int:
        return len(self._queue)

    def deferred(self) -> int:
        return self._queue.held_count()

    def running(self) -> int:
        return len(self._admitted)

    # -- the step: schedule

    @property
    def max_batched_tokens(self) -> int:
        """Tokens of a step."""
        return self.shortage.step_tokens

    def schedule(self) -> Batch:
        """Choose a step's tokens and allocate their blocks. They count as computed from here on."""
        self.steps += 1
        self.shortage.begin_step(self.steps)
        scheduled_at = self._clock()
        self._release_held()
        decodes = self._decodes()
        drafts = self._draft(decodes)
        decode_count = np.ones(len(decodes), np.int32) if drafts is None else drafts + 1
        chunks, counts = self._prefills(self._prefill_budget(len(decodes), int(decode_count.sum())))
        slots, count = decodes, decode_count
        kind = count > 1
        if len(chunks):
            slots, count = np.concatenate((decodes, chunks)), np.concatenate((count, counts))
            kind = np.concatenate((decode_count > 1, 2 * (counts > 1)))
        order = np.lexsort((self.computed[slots], kind))
        slots, count = slots[order], count[order]
        start = self.computed[slots]
        self.computed[slots] = start + count
        self._last_step[slots] = self.steps
        drafted = np.zeros(len(slots), np.int32) if drafts is None else self._drafted(order, drafts)
        samples = (start + count - drafted == self._ahead(slots)).nonzero()[0]
        singles = int(np.count_nonzero(count == 1))
        return Batch(
            slots=slots,
            start=start,
            count=count,
            singles=singles,
            decodes=singles + (0 if drafts is None else int(np.count_nonzero(drafts))),
            samples=samples,
            generations=self.table.generation[slots[samples]],
            drafts=None if drafts is None else drafted[samples],
            prompts=chunks,
            scheduled_at=scheduled_at,
        )

    def _drafted(self, order: NDArray[np.intp], drafts: I32) -> I32:
        """int32[parts]: draft tokens of the parts in their order, of which the first ones decode."""
        drafted: I32 = np.concatenate((drafts, np.zeros(len(order) - len(drafts), np.int32)))[order]
        return drafted

    def mark_launched(self, batch: Batch) -> None:
        """The batch is running; its sampled tokens are on the device until it is settled."""
        self.table.in_flight_tokens[batch.slots[batch.samples]] += 1
        for slot in batch.prompts.tolist():
            self.prefix_cache.mark_computed(slot, int(self.computed[slot]))
        if self.shortage:
            self.shortage.on_launched(self.computed, self.steps)

    def _ahead(self, slots: Slots) -> I32:
        """int32[n]: length of each history, including tokens that are still on the device only."""
        ahead: I32 = self.table.length[slots] + self.table.in_flight_tokens[slots]
        return ahead

    def _decodes(self) -> Slots:
        """Slots that decode one token; allocates blocks for these tokens, preempting streams if needed."""
        slots = self._admitted
        ahead = self._ahead(slots)
        one = (ahead - self.computed[slots] == 1) & (ahead < self.table.end[slots])
        one &= self.blocks.block_counts[slots] > 0
        if self.speculation is not None:
            self.speculation.plan(slots)
        unread = self.table.in_flight_tokens[slots] > 0
        if np.count_nonzero(unread):
            one &= ~(unread & self._reads_history(slots))
        decodes: Slots = slots[one]
        if len(decodes) > self.max_batched_tokens:  # those that have waited longest
            turn = np.argsort(self._last_step[decodes], kind="stable")
            decodes = decodes[turn[: self.max_batched_tokens]]
        missing = self.blocks.missing(decodes, self._ahead(decodes))
        if not np.count_nonzero(missing):
            return decodes
        while int(missing.sum()) > self.blocks.free_count():
            victim = self._preempt_last()
            kept = decodes != victim
            decodes, missing = decodes[kept], missing[kept]
        self.blocks.allocate(decodes, missing)
        return decodes

    def _reads_history(self, slots: Slots) -> NDArray[np.bool_]:
        """bool[n]: slots whose next step needs all their tokens on the host. They skip a step that is
        scheduled before the last one is read; the others do not wait for them."""
        reads: NDArray[np.bool_] = self.sampling.needs[slots] & READS_LAST_TOKEN != 0
        if self.speculation is not None:
            reads |= self.speculation.limit[slots] > 0
        return reads

    def _draft(self, decodes: Slots) -> I32 | None:
        """int32[n]: number of draft tokens behind each history of ``decodes``, which have blocks; None: there
        are none. Drafts never preempt a stream."""
        if self.speculation is None or self.speculation.is_idle or not len(decodes):
            return None
        length = self.table.length[decodes]
        most = np.minimum(self.speculation.limit[decodes], self.table.end[decodes] - length - 1)
        most[self.table.in_flight_tokens[decodes] > 0] = 0
        if self.shortage:
            most = np.minimum(most, self.shortage.most_tokens(decodes) - 1)
        budget = self.max_batched_tokens - len(decodes)
        if len(decodes) < len(self._admitted) or (self._queue and self.table.free_count()):
            budget //= 2  # prompts wait
        most = np.clip(budget - (np.cumsum(most, dtype=np.int32) - most), 0, most)
        if not np.count_nonzero(most):
            return None
        missing = self.blocks.missing(decodes, length + most)
        if np.count_nonzero(missing):
            fits = np.cumsum(missing) <= self.blocks.free_count()
            most[~fits], missing[~fits] = 0, 0
            self.blocks.allocate(decodes, missing)
        try:
            drafts = self.speculation.propose(decodes, most)
        except Exception:  # noqa: BLE001 - what drafts are made from may be one stream's; all do without
            _log_fault("drafts", "a step has no drafts", exc_info=True)
            self.sampling.counted[decodes] = NOT_COUNTED
            return None
        return drafts if np.count_nonzero(drafts) else None

    def _preempt_last(self) -> int:
        """Preempt the least important stream, among equals the one admitted last. Returns its slot."""
        holders = self._admitted[self.blocks.block_counts[self._admitted] > 0]
        victim = int(holders[-1])
        self._preempt(victim)
        return victim

    def _preempt(self, slot: int) -> None:
        """Free the blocks of a stream."""
        self._release_blocks(slot, forever=False)
        self.computed[slot] = 0
        self.preemptions += 1
        self.table.note_preemption(slot)

    def _prefill_budget(self, decodes: int, tokens: int) -> int:
        """Prompt tokens that may be computed beside ``decodes`` decodes, which have ``tokens`` tokens."""
        if decodes == len(self._admitted) and not (self._queue and self.table.free_count()):
            return 0  # there is no prompt to compute
        budget = self.max_batched_tokens - tokens
        return self.step_cost.allowed(budget, decodes) if decodes else budget

    def _prefills(self, budget: int) -> tuple[Slots, I32]:
        """Chunked prefill: slots and token counts, up to ``budget`` tokens in total; begun prompts first."""
        chosen: list[int] = []
        counts: list[int] = []
        for slot in chain(self._started_prefills(), self._new_prefills()) if budget else ():
            chosen.append(slot)
            most = budget if not self.shortage else min(budget, self.shortage.most_tokens_of(slot))
            counts.append(min(int(self.table.length[slot] - self.computed[slot]), most))
            budget -= counts[-1]
            if not budget:
                break
        return np.array(chosen, np.intp), np.array(counts, np.int32)

    def _started_prefills(self) -> list[int]:
        slots = self._admitted
        pending = self.table.length[slots] - self.computed[slots]
        begun: list[int] = slots[(pending > 1) & (self.blocks.block_counts[slots] > 0)].tolist()
        return begun

    def _release_held(self) -> None:
        """Let the streams begin whose adapter has room, whose prefix is computed or whose grammar is
        compiled; end those whose grammar is not valid."""
        if self.adapter_room is not None:
            for adapter in self.adapter_room.take_ready():
                self._queue.release(self.adapter_room.awaited_by(adapter))
        for digest in self.prefix_cache.take_settled():
            self._queue.release(digest)
        if self._has_freed_grammar:
            self._has_freed_grammar = False
            self._queue.release(GRAMMAR_ROOM)
        for compilation in self.sampling.grammars.take_finished():
            for waiting in self._queue.release(compilation):
                if compilation.error is not None:
                    self._queue.fail(waiting, compilation.error.code, str(compilation.error))

    def _new_prefills(self) -> Iterator[int]:
        """Allocate blocks to streams that have none, one stream at a time, and yield their slots.

        The most important stream comes first, among equals a preempted one, then the longest-waiting. One
        that cannot start yet is held, in nobody's way. Stops at the first one that does not fit: smaller ones
        do not overtake it.
        """
        for candidate in self._candidates():
            if not self._may_start(candidate):
                continue
            prefix, length = self._history_of(candidate)
            found = self.prefix_cache.find(prefix)
            if found is None:
                if isinstance(candidate, WaitingStream) and prefix is not None:
                    self._queue.hold(candidate, prefix.awaited)
                continue
            if not self._has_room(length, found):
                return
            slot = self._admit(candidate, found) if isinstance(candidate, WaitingStream) else candidate
            self._begin(slot, prefix, found)
            yield slot

    def _candidates(self) -> Iterator[int | WaitingStream]:
        """Slots of preempted streams and, if slots are free, waiting streams, in order of priority."""
        slots = self._admitted
        has_blocks = self.blocks.block_counts[slots] > 0
        without_blocks = ~has_blocks & (self.table.in_flight_tokens[slots] == 0)
        if self.shortage and np.count_nonzero(has_blocks):
            without_blocks &= self.shortage.may_begin(slots, self.steps)
        preempted: list[int] = slots[without_blocks].tolist()
        free = self.table.free_count()
        newcomers = list(islice(self._queue, free + MAX_HELD_PER_STEP)) if free else []
        return merge(preempted, newcomers, key=self._priority_of)

    def _priority_of(self, candidate: int | WaitingStream) -> int:
        return candidate.priority if isinstance(candidate, WaitingStream) else int(self.priority[candidate])

    def _may_start(self, candidate: int | WaitingStream) -> bool:
        """False without a free slot, or if the grammar is not compiled or the adapter has no room: then the
        stream is held or failed."""
        if not isinstance(candidate, WaitingStream):
            return True
        if not self.table.free_count():
            return False
        if candidate.compilation is not None:
            try:
                if not self._has_grammar(candidate, candidate.compilation):
                    return False
            except RequestRejected as error:
                self._queue.fail(candidate, error.code, str(error))
                return False
        return candidate.adapter is None or self._has_adapter_room(candidate, candidate.adapter)

    def _has_adapter_room(self, waiting: WaitingStream, adapter: LoadedAdapter) -> bool:
        """Whether the adapter may run in the next step; otherwise the stream is held until it may."""
        assert self.adapter_room is not None
        if self.adapter_room.may_start(adapter):
            return True
        self._queue.hold(waiting, self.adapter_room.awaited_by(adapter))
        return False

    def _has_grammar(self, waiting: WaitingStream, compilation: Compilation) -> bool:
        """Whether the grammar is compiled; otherwise the stream is held until it is. Raises RequestRejected
        for a grammar that is not valid or contradicts other constraints."""
        sampling = waiting.request.sampling
        if compilation.state is State.EVICTED:  # it was compiled long ago
            assert sampling.grammar is not None
            compilation = self.sampling.grammars.request(waiting.server, sampling.grammar)
            self._withdraw_compilation(waiting)
            waiting.compilation = compilation
        if compilation.state is not State.DONE:
            self._queue.hold(waiting, compilation)
            return False
        if compilation.error is not None:
            raise compilation.error
        contradiction = self.sampling.contradiction(sampling, compilation)
        if contradiction is not None and not waiting.request.resumed:
            raise RequestRejected(contradiction)
        if not self.sampling.grammars.has_room(compilation):
            self._queue.hold(waiting, GRAMMAR_ROOM)
            return False
        return True

    def _history_of(self, candidate: int | WaitingStream) -> tuple[Prefix | None, int]:
        """Prefix and length of the candidate's history."""
        if isinstance(candidate, WaitingStream):
            if candidate.prefix is None:
                candidate.prefix = self.prefix_cache.prefix_of(candidate.request, candidate.adapter)
            return candidate.prefix, candidate.tokens
        return self.prefix_cache.prefix_of_preempted(candidate), int(self.table.length[candidate])

    def _has_room(self, length: int, found: Match) -> bool:
        """Whether ``length`` tokens, of which the blocks ``found`` are cached, fit and leave one free block
        for every stream that has blocks.

        Without that margin a preempted stream would return only to be preempted again.
        """
        margin = int(np.count_nonzero(self.blocks.block_counts[self._admitted]))
        wanted = self.blocks.blocks_for(length) - found.blocks + found.idle
        return wanted + margin <= self.blocks.free_count()

    def _admit(self, newcomer: WaitingStream, found: Match) -> int:
        """Move a waiting stream into a free slot; there is room for its prompt."""
        self._queue.remove(newcomer)
        slot = self.table.allocate(newcomer.server, newcomer.request, newcomer.adapter)
        if self.adapter_room is not None and newcomer.adapter is not None:
            self.adapter_room.start(slot, newcomer.adapter)
        self.sampling.set(slot, newcomer.request.sampling, newcomer.compilation)
        self.priority[slot] = newcomer.priority
        admitted = self._admitted
        index = int(self.priority[admitted].searchsorted(newcomer.priority, side="right"))
        self._admitted = np.concatenate((admitted[:index], np.array([slot], np.intp), admitted[index:]))
        if self.speculation is not None:
            scope = CacheScope(newcomer.request.cache_salt, newcomer.request.adapter_key)
            self.speculation.begin(slot, int.from_bytes(scope.seed(8), "little", signed=True))
        self.prefix_cache.record_lookup(newcomer.prefix, newcomer.tokens, found)
        if not newcomer.request.resumed:  # the engine that ran it before has reported its cached tokens
            self.table.cached[slot] = found.blocks * self.blocks.block_size
        return slot

    def _begin(self, slot: int, prefix: Prefix | None, found: Match) -> None:
        """Allocate blocks for a stream's whole history, so that a begun prefill never waits for memory."""
        wanted = self.blocks.blocks_for(int(self.table.length[slot]))
        self.prefix_cache.attach(slot, prefix, found, wanted)
        self.computed[slot] = found.blocks * self.blocks.block_size
        if self.speculation is not None:
            self.speculation.restart(slot)

    # -- a batch that cannot be launched

    def running_parts(self, batch: Batch) -> Batch:
        """The parts of a batch that is not launched, without those of streams that have left."""
        left = self.table.generation[batch.slots[batch.samples]] != batch.generations
        return batch.select(np.setdiff1d(np.arange(len(batch)), batch.samples[left]))

    def fail(self, part: Batch, message: str) -> StepRows:
        """End the streams of a batch whose tokens cannot be computed, with rows of those held back."""
        self.computed[part.slots] = part.start
        return self._fail(part.slots, "engine_error", message)

    def set_aside(self, part: Batch, message: str) -> StepRows:
        """Preempt the streams of a batch for which the device has no memory, for others to advance; end
        those that were tried often enough."""
        self.computed[part.slots] = part.start
        given_up = []
        for slot, count, start in zip(part.slots.tolist(), part.count, part.start, strict=True):
            if self.shortage.may_try_again(slot, int(count), int(start + count), self.steps):
                self._preempt(slot)
            else:
                given_up.append(slot)
        return self._fail(np.array(given_up, np.intp), "engine_error", message)

    # -- the step: settle

    def update_from_output(self, batch: Batch, tokens: I32, logprobs: Logprobs | None) -> StepRows:
        """Append the sampled tokens, make the rows that are due, and free the slots of finished streams.

        ``tokens`` int32[rows of ``batch.sampled_rows()``], NO_TOKEN for streams whose constraints exclude
        every token; ``logprobs.token`` indexes them. Batches are settled in the order in which they were
        scheduled; tokens of streams that have left are dropped.
        """
        generated = self.table.generated
        rows = self._update(batch, tokens, logprobs)
        self._record_step_cost(batch)
        if self.speculation is not None and batch.decodes == len(batch):
            self.speculation.observe(
                self._step_s,
                int(batch.count.sum()),
                self.table.generated - generated,
                drafts=batch.drafts is not None,
            )
        return rows

    def _update(self, batch: Batch, tokens: I32, logprobs: Logprobs | None) -> StepRows:
        slots = batch.slots[batch.samples]
        alive = self.table.generation[slots] == batch.generations
        running = slots[alive]
        self.table.in_flight_tokens[running] = np.maximum(self.table.in_flight_tokens[running] - 1, 0)
        if batch.drafts is not None:
            return self._update_runs(slots, batch.drafts, alive, tokens, logprobs)
        sampled = tokens != NO_TOKEN
        stuck = slots[alive & ~sampled]
        alive &= sampled
        if np.count_nonzero(alive) < len(alive):
            slots, tokens = slots[alive], tokens[alive]
            logprobs = None if logprobs is None else logprobs.select_tokens(alive)
        rows = self._append(slots, tokens, logprobs) if len(slots) else empty_rows()
        return concat_rows([rows, self._end_stuck(stuck)]) if len(stuck) else rows

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
        runs = verify(self.table, self.sampling, slots, drafts, tokens, logprobs)
        # The keys and values of rejected tokens are overwritten. A preempted stream has none any more.
        verified = (drafts > 0) & (self.blocks.block_counts[slots] > 0)
        self.computed[slots[verified]] = (self.table.length[slots] + runs.accepted)[verified]
        self.table.append_runs(slots, runs.tokens, runs.count)
        if self.speculation is not None:
            self.speculation.on_verified(slots, drafts, runs.accepted)
        wanting = self.sampling.logprobs[slots] >= 0
        held = None
        if np.count_nonzero(wanting):
            due = self.table.due(slots, runs.finish)
            held = self.logprobs_buffer.append_runs_and_take_due(
                slots, runs.count, due, wanting, runs.logprobs
            )
        return self._rows(slots, runs.finish, held, runs.broken)

    def _append(self, slots: Slots, tokens: I32, logprobs: Logprobs | None) -> StepRows:
        """Append one token each, make the rows that are due, and free the slots of streams that end."""
        ends = self.table.append_and_check_stop(slots, tokens)
        broken = self.sampling.accept(slots, tokens, ends)
        if logprobs is not None:
            due = self.table.due(slots, ends)
            logprobs = self.logprobs_buffer.append_and_take_due(slots, due, logprobs)
        return self._rows(slots, ends, logprobs, broken)

    def _rows(self, slots: Slots, ends: I8, logprobs: Logprobs | None, broken: dict[int, str]) -> StepRows:
        """The rows that are due; frees the slots of streams that end."""
        rows = self.table.rows(slots, ends)
        rows.logprobs = logprobs
        if not np.count_nonzero(ends):
            return rows
        if broken:
            failed = slots[ends == FAILED].tolist()
            rows.failed = [
                self.table.failure(slot, "invalid_request", f"structured output: {broken[slot]}")
                for slot in failed
            ]
        self._free(slots[ends != FinishReason.NONE])
        return rows

    def _end_stuck(self, slots: Slots) -> StepRows:
        """End streams whose constraints exclude every token, with the tokens that they held back."""
        ends = np.full(len(slots), FinishReason.GRAMMAR, np.int8)
        wanting = self.sampling.logprobs[slots] >= 0
        logprobs = self.logprobs_buffer.take_due(slots, np.ones(len(slots), np.bool_), wanting)
        rows = self.table.rows(slots, ends)
        rows.logprobs = logprobs
        self._free(slots)
        return rows

    def _record_step_cost(self, batch: Batch) -> None:
        """A step begins when it is scheduled or, if scheduled ahead, when the step before it is settled."""
        now = self._clock()
        seconds = now - max(batch.scheduled_at, self._settled_at)
        self._settled_at, self._step_s = now, seconds
        chunks = int(batch.count[batch.decodes :].sum()) if batch.decodes < len(batch) else 0
        self.step_cost.observe(seconds, chunks, batch.decodes)
