"""Which tokens of which streams a step computes: columns over slots, no tensors, no clock.

Streams are admitted first come, first served, when a slot is free and the KV cache holds their whole
prompt. A step computes one token of every stream that decodes, and with what is left of
``max_batched_tokens`` chunks of the prompts that are not computed yet. When decodes need more blocks than
are free, the stream admitted last gives its blocks back; it keeps its slot and its history, and is
computed again, as if its history were a prompt, when there is room.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..wire.frames import I32, Finish, Logprobs
from ..wire.messages import Submit, WireError
from .base import RequestRejected, StepRows, StreamFailure
from .blocks import BlockTables
from .logprobs import HeldLogprobs
from .rows import aborted_rows, joined, no_rows
from .sampling import SamplingColumns
from .slots import SlotTable

Slots = NDArray[np.intp]


@dataclass(slots=True, frozen=True)
class Batch:
    """What one step computes: B parts, ``count`` tokens from history position ``start`` of each slot.

    The first ``singles`` parts have one token each and stand in order of ``start``.
    """

    slots: Slots
    start: I32
    count: I32
    singles: int
    samples: NDArray[np.intp]
    """Indexes of the parts that reach the end of their history: these get a next token."""

    def __len__(self) -> int:
        return len(self.slots)


class Scheduler:
    """Decides what runs; owns the waiting queue, and the slots' and blocks' assignment to streams."""

    def __init__(
        self, table: SlotTable, sampling: SamplingColumns, blocks: BlockTables, max_batched_tokens: int
    ) -> None:
        self.table = table
        self.sampling = sampling
        self.blocks = blocks
        self.held = HeldLogprobs(table)
        self.max_batched_tokens = max_batched_tokens
        self.computed = np.zeros(table.size, np.int32)
        """Tokens of each slot's history whose keys and values are in the cache after the last step."""
        self._last_step = np.zeros(table.size, np.int64)
        self._admitted = np.zeros(0, np.intp)
        """Slots in use, in order of admission."""
        self._waiting: dict[tuple[int, int], Submit] = {}
        self._aborted_waiting: list[tuple[int, int, int]] = []
        self._aborted_slots: dict[int, None] = {}

        # -- counters
        self.steps = 0
        self.preemptions = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0

    # -- streams come and go

    def submit(self, server: int, request: Submit) -> None:
        """Queue a stream. Raises RequestRejected when it could never run to its end, WireError when its
        handle is in use."""
        key = (server, request.stream)
        if key in self._waiting or self.table.find(*key) is not None:
            raise WireError(f"Submit.stream {request.stream} is running already")
        self._check_length(request)
        self._check_prompt(request)
        self.sampling.check(request.sampling)
        self._waiting[key] = request

    def _check_length(self, request: Submit) -> None:
        length, limit = len(request.prompt) // 4, request.sampling.max_tokens
        base = length - request.resumed
        if len(request.prompt) % 4 or not length or base < 0:
            raise RequestRejected("prompt: at least one token, four bytes each, of which resumed are output")
        if length >= self.table.max_model_len:
            raise RequestRejected(
                f"prompt: {length} tokens leave no room for output; the model takes "
                f"{self.table.max_model_len} tokens, prompt and output together"
            )
        if limit <= request.resumed:
            raise RequestRejected(f"max_tokens: {limit}, but must be more than {request.resumed}")
        end = min(base + limit, self.table.max_model_len)
        capacity = self.blocks.blocks * self.blocks.block_size
        if end - 1 > capacity:  # the last token is never read back
            raise RequestRejected(
                f"prompt and max_tokens: {base} + {end - base} tokens do not fit the KV cache, "
                f"which holds {capacity}; ask for fewer tokens or serve with more --kv-cache-memory"
            )

    def _check_prompt(self, request: Submit) -> None:
        prompt = np.frombuffer(request.prompt, "<i4")
        for token in (int(prompt.min()), int(prompt.max())):
            if not 0 <= token < self.sampling.vocab_size:
                raise RequestRejected(
                    f"prompt: token id {token}, but the vocabulary has {self.sampling.vocab_size}"
                )

    def abort(self, server: int, streams: Sequence[int]) -> None:
        """Stop streams; ``take_aborted`` gives their ends. Unknown ones are ignored."""
        for stream in streams:
            waiting = self._waiting.pop((server, stream), None)
            if waiting is not None:
                self._aborted_waiting.append((server, stream, waiting.resumed))
                continue
            slot = self.table.find(server, stream)
            if slot is not None:
                self._aborted_slots[slot] = None

    def take_aborted(self) -> StepRows:
        """The ends of aborted streams, with the tokens they still held; their slots are free afterwards."""
        if not self._aborted_slots and not self._aborted_waiting:
            return no_rows()
        parts = []
        if self._aborted_waiting:
            parts.append(aborted_rows(self._aborted_waiting))
        if self._aborted_slots:
            slots = np.fromiter(self._aborted_slots, np.intp)
            parts.append(self.table.rows(slots, np.full(len(slots), Finish.ABORT, np.int8)))
            self._free(slots)
        self._aborted_waiting, self._aborted_slots = [], {}
        return joined(parts)

    def drop_server(self, server: int) -> None:
        """Forget an API server's streams."""
        self._waiting = {key: request for key, request in self._waiting.items() if key[0] != server}
        self._aborted_waiting = [aborted for aborted in self._aborted_waiting if aborted[0] != server]
        slots = self.table.slots_of(server)
        for slot in slots:
            self._aborted_slots.pop(slot, None)
        self._free(np.array(slots, np.intp))

    def fail_all(self, code: str, message: str) -> StepRows:
        """End every stream by an error, with the rows of tokens that were held back."""
        slots = self._admitted
        for slot in slots.tolist():
            self.blocks.release(slot)
            self.sampling.clear(slot)
            self.held.clear(slot)
        rows = self.table.fail_all(code, message)
        without_slot = self._aborted_waiting + [
            (*key, request.resumed) for key, request in self._waiting.items()
        ]
        rows.failed = [*rows.failed, *(StreamFailure(*end, code, message) for end in without_slot)]
        self._waiting, self._aborted_waiting, self._aborted_slots = {}, [], {}
        self._admitted = self._admitted[:0]
        return rows

    def _free(self, slots: Slots) -> None:
        for slot in slots.tolist():
            self.blocks.release(slot)
            self.sampling.clear(slot)
            self.held.clear(slot)
            self.table.release(slot)
        self._admitted = self._admitted[~np.isin(self._admitted, slots)]

    # -- state

    def has_work(self) -> bool:
        return bool(len(self._admitted) or self._waiting or self._aborted_waiting)

    def waiting(self) -> int:
        return len(self._waiting)

    def running(self) -> int:
        return len(self._admitted)

    # -- the step: schedule

    def schedule(self) -> Batch:
        """Choose a step's tokens and give them blocks. The chosen tokens count as computed at once."""
        self.steps += 1
        decodes = self._decodes()
        chunks, counts = self._prefills(self.max_batched_tokens - len(decodes))
        slots = np.concatenate((decodes, chunks))
        count = np.concatenate((np.ones(len(decodes), np.int32), counts))
        order = np.lexsort((self.computed[slots], count > 1))
        slots, count = slots[order], count[order]
        start = self.computed[slots]
        self.computed[slots] = start + count
        self._last_step[slots] = self.steps
        samples = np.flatnonzero(start + count == self.table.length[slots])
        return Batch(slots, start, count, int(np.count_nonzero(count == 1)), samples)

    def _decodes(self) -> Slots:
        """Streams with one token to compute; blocks for these tokens are taken."""
        slots = self._admitted
        one = self.table.length[slots] - self.computed[slots] == 1
        decodes: Slots = slots[one & (self.blocks.owned[slots] > 0)]
        if len(decodes) > self.max_batched_tokens:  # turn by turn: those that have waited longest
            turn = np.argsort(self._last_step[decodes], kind="stable")
            decodes = decodes[turn[: self.max_batched_tokens]]
        missing = self.blocks.missing(decodes, self.table.length[decodes])
        while int(missing.sum()) > self.blocks.free_count():
            victim = self._preempt_last()
            kept = decodes != victim
            decodes, missing = decodes[kept], missing[kept]
        self.blocks.take(decodes, missing)
        return decodes

    def _preempt_last(self) -> int:
        holders = self._admitted[self.blocks.owned[self._admitted] > 0]
        victim = int(holders[-1])
        self.blocks.release(victim)
        self.computed[victim] = 0
        self.preemptions += 1
        return victim

    def _prefills(self, budget: int) -> tuple[Slots, I32]:
        """Prompt chunks of up to ``budget`` tokens together: running prompts first, then newcomers."""
        chosen: list[int] = []
        counts: list[int] = []
        for slot in self._unfinished_prefills():
            if not budget or not (self.blocks.owned[slot] or self._give_blocks(slot)):
                break
            chosen.append(slot)
            counts.append(self._chunk(slot, budget))
            budget -= counts[-1]
        else:
            while budget and (newcomer := self._admit()) is not None:
                chosen.append(newcomer)
                counts.append(self._chunk(newcomer, budget))
                budget -= counts[-1]
        return np.array(chosen, np.intp), np.array(counts, np.int32)

    def _unfinished_prefills(self) -> list[int]:
        slots = self._admitted
        pending = self.table.length[slots] - self.computed[slots]
        unfinished: list[int] = slots[(pending > 1) | (self.blocks.owned[slots] == 0)].tolist()
        return unfinished

    def _chunk(self, slot: int, budget: int) -> int:
        return min(int(self.table.length[slot] - self.computed[slot]), budget)

    def _has_room(self, length: int) -> bool:
        """Whether ``length`` tokens fit and leave every stream that holds blocks one more.

        Without that margin a stream that was preempted would come back only to be preempted again.
        """
        margin = int(np.count_nonzero(self.blocks.owned[self._admitted]))
        return self.blocks.blocks_for(length) + margin <= self.blocks.free_count()

    def _give_blocks(self, slot: int) -> bool:
        """Blocks for a stream's whole history, so that a prefill that has begun never waits for memory."""
        length = int(self.table.length[slot])
        if not self._has_room(length):
            return False
        self.blocks.take(np.array([slot]), np.array([self.blocks.blocks_for(length)], np.int32))
        return True

    def _admit(self) -> int | None:
        """Move the longest-waiting stream into a slot, if there is one and room for it."""
        if not self._waiting or not self.table.free_count():
            return None
        key, request = next(iter(self._waiting.items()))
        if not self._has_room(len(request.prompt) // 4):
            return None
        del self._waiting[key]
        slot = self.table.allocate(key[0], request)
        self.sampling.set(slot, request.sampling)
        self.computed[slot] = 0
        self._admitted = np.append(self._admitted, slot)
        self._give_blocks(slot)
        self.prompt_tokens += int(self.table.base[slot])
        return slot

    # -- the step: settle

    def settle(self, batch: Batch, tokens: I32, logprobs: Logprobs | None) -> StepRows:
        """Append the sampled tokens, make the rows that are due, and free the slots of streams that ended.

        ``tokens`` int32[len(batch.samples)]; the ``token`` of ``logprobs`` indexes them.
        """
        slots = batch.slots[batch.samples]
        if not len(slots):
            return no_rows()
        self.generated_tokens += len(slots)
        finish = self.table.settle(slots, tokens)
        placed = self.held.place(slots, self.table.due(slots, finish), logprobs)
        rows = self.table.rows(slots, finish)
        rows.logprobs = placed
        ended = slots[finish != Finish.NONE]
        if len(ended):
            self._free(ended)
        return rows
