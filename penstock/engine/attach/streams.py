"""The streams of an attached engine: those that wait for a slot, and those with one, which vLLM runs.

vLLM schedules the requests that it was given, and decides when they finish. Its output is appended to the
slots' histories once per step, and rows are made from there as in every engine, by each stream's output
interval. How requests reach vLLM, and what they are called there, is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.config.serve import ServeConfig
from penstock.engine.attach.output_decoder import DecodedOutputs
from penstock.engine.attach.step_output import FAILED, LogprobArrays, StepEvents, VllmCounters
from penstock.engine.attach.text_outputs import TextOutputs
from penstock.engine.base import Hold, StepRows
from penstock.engine.batch.logprobs import LogprobsBuffer
from penstock.engine.batch.prompt_logprobs import PromptLogprobsState
from penstock.engine.batch.slots import SlotTable
from penstock.engine.lora.adapter_table import AdapterTable, adapter_of
from penstock.engine.schedule.submit_checks import check_request
from penstock.engine.schedule.waiting_queue import WaitingQueue, WaitingStream
from penstock.wire.arrays import I8, I32
from penstock.wire.frames import FinishReason
from penstock.wire.logprobs import Logprobs
from penstock.wire.messages import EngineInfo, KVTransferParams, Submit, WireError

Slots = NDArray[np.intp]


class AttachedStreams:
    """Waiting streams and slots. Every slot that :meth:`begin` gives is given back by :meth:`release` or
    :meth:`fail_all`."""

    def __init__(
        self, config: ServeConfig, info: EngineInfo, slots: int, adapters: AdapterTable | None
    ) -> None:
        """``slots``: requests that vLLM has at the same time."""
        self.table = SlotTable(slots, info.max_model_len, (), vocab_size=info.vocab_size)
        self.queue = WaitingQueue(config)
        self.aborted: dict[int, None] = {}
        """Slots of aborted streams, to be taken by :meth:`take_aborted`."""
        self._vocab_size = info.vocab_size
        self._adapters = adapters
        self._logprobs_buffer = LogprobsBuffer(self.table)
        self._prompt_logprobs = PromptLogprobsState(self.table)
        self.alternatives = np.full(slots, -1, np.int32)
        """Candidates per token that a slot's stream wants beside the token itself; -1: no logprobs."""
        self._outputs = TextOutputs(self.table, self.alternatives, info.vocab_size)

    # -- streams come and go

    def submit(self, server: int, request: Submit) -> None:
        """Queue a stream. Raises RequestRejected, WireError."""
        self._check(server, request)
        self.queue.push(server, request, self.table.free_count(), adapter_of(request, self._adapters))

    def _check(self, server: int, request: Submit) -> None:
        """Raises RequestRejected, WireError."""
        if self.table.find_slot(server, request.stream) is not None:
            raise WireError(f"Submit.stream {request.stream} is running already")
        check_request(request, self.table.max_model_len, self._vocab_size)

    def begin_at_once(self, server: int, request: Submit) -> int | None:
        """Give a stream that need not wait a slot, without the queue. Returns the slot; None: it has to wait,
        see :meth:`submit`. Raises RequestRejected, WireError."""
        table = self.table
        if self.queue or not table.free_count():
            return None
        self._check(server, request)
        slot = table.allocate(server, request, adapter_of(request, self._adapters))
        self.alternatives[slot] = request.sampling.logprobs
        return slot

    def abort(self, server: int, streams: Sequence[int]) -> None:
        """Stop streams: waiting ones at once, others by :meth:`take_aborted`."""
        for stream in streams:
            if self.queue.abort(server, stream):
                continue
            slot = self.table.find_slot(server, stream)
            if slot is not None:
                self.aborted[slot] = None

    def drop_server(self, server: int) -> list[int]:
        """Forget the waiting streams of an API server. Returns the slots of its others, to be released."""
        self.queue.drop_server(server)
        return self.table.slots_of(server)

    def can_begin(self, hold: Hold) -> bool:
        """Whether :meth:`begin_next` would give a slot."""
        return bool(hold is Hold.NOTHING and self.queue and self.table.free_count())

    def begin_next(self, hold: Hold) -> tuple[int, WaitingStream] | None:
        """Give the stream whose turn it is a slot. Returns both; None: there is none, or no slot."""
        if not self.can_begin(hold):
            return None
        first = next(iter(self.queue))
        self.queue.remove(first)
        slot = self.table.allocate(first.server, first.request, first.adapter)
        self.alternatives[slot] = first.request.sampling.logprobs
        return slot, first

    def take_aborted(self) -> tuple[list[int], StepRows]:
        """Slots of aborted streams, to be released, and the streams' ends, with held tokens."""
        slots = list(self.aborted)
        rows = self.table.rows(np.array(slots, np.intp), np.full(len(slots), FinishReason.ABORT, np.int8))
        return slots, rows

    def release(self, slots: Sequence[int]) -> None:
        """Streams have ended; their slots are free."""
        for slot in slots:
            self.alternatives[slot] = -1
            self.aborted.pop(slot, None)
            self.table.release(slot)

    def flush(self) -> StepRows:
        """Rows of all tokens that were held back; the streams go on."""
        wanting = self.alternatives >= 0
        slots = np.array(self.table.running_slots(), np.intp)
        return self.table.flush(slots, lambda held: self._logprobs_buffer.take_held(held, wanting))

    def fail(self, slot: int, code: str, message: str) -> StepRows:
        """End a slot's stream with an error, and free the slot."""
        self.alternatives[slot] = -1
        self.aborted.pop(slot, None)
        return self.table.fail(np.array([slot], np.intp), code, message)

    def fail_all(self, code: str, message: str) -> StepRows:
        """End every stream with an error, and free all slots."""
        wanting = self.alternatives >= 0
        self.alternatives[:] = -1
        self.aborted.clear()
        rows = self.table.fail_all(
            code, message, lambda slots: self._logprobs_buffer.take_held(slots, wanting)
        )
        rows.failed = [*rows.failed, *self.queue.fail_all(code, message)]
        return rows

    # -- the step

    def settle(
        self, decoded: DecodedOutputs, frames: list[memoryview], counts: VllmCounters
    ) -> tuple[list[StepRows], list[int]]:
        """Append vLLM's output to the slots, and make the rows that are due. ``frames``: of its message.
        Returns the rows, and the slots whose streams have ended, to be released. Raises EngineLost."""
        events = self._outputs.read(decoded, frames, counts)
        slots = decoded.slots
        finish = np.zeros(len(slots), np.int8)
        failed: list[tuple[int, tuple[str, str]]] = []
        for entry, reason in events.ended:
            if reason is None:
                failed.append((int(slots[entry]), events.errors.get(entry, ("engine_error", FAILED))))
            else:
                finish[entry] = reason
        for entry in events.preempted:
            self.table.note_preemption(int(slots[entry]))
        for entry, cached in events.cached:
            self.table.cached[slots[entry]] = cached
        parts = [self._prompt_rows(int(slots[entry]), scores) for entry, scores in events.prompts]
        for slot, _ in failed:
            self.table.flush_next(slot)
        parts.append(self._rows(slots, decoded.tokens, decoded.count, finish, events))
        parts[-1].failed = [self.table.failure(slot, *error) for slot, error in failed]
        if events.transfers:
            parts[-1].kv_transfer_params = self._transfers(slots, events)
        ended = slots[finish != 0].tolist() if events.ended else []
        return parts, [*ended, *(slot for slot, _ in failed)]

    def _rows(
        self, slots: Slots, tokens: I32, count: NDArray[np.intp] | None, finish: I8, events: StepEvents
    ) -> StepRows:
        """Append the tokens and make the rows that are due."""
        table = self.table
        if not events.logprobs:
            if count is None:
                table.append(slots, tokens)
            else:
                table.append_runs(slots, tokens, count.astype(np.int32))
            return table.rows(slots, finish)
        self._append_scored(slots, tokens, count, events)
        due = table.due(slots, finish)
        logprobs = self._logprobs_buffer.take_due(slots, due, self.alternatives[slots] >= 0)
        rows = table.rows(slots, finish)
        rows.logprobs = logprobs
        return rows

    def _append_scored(
        self, slots: Slots, tokens: I32, count: NDArray[np.intp] | None, events: StepEvents
    ) -> None:
        """Append the tokens, and what some have of logprobs: one token of each stream at a time."""
        if count is None:
            count = np.ones(len(slots), np.intp)
        starts = count.cumsum() - count
        for index in range(int(count.max(initial=0))):
            some = np.flatnonzero(count > index)
            self.table.append(slots[some], tokens[starts[some] + index])
            row_of = {entry: row for row, entry in enumerate(some.tolist())}
            wanted = [(row_of[entry], scores) for entry, scores in events.logprobs if entry in row_of]
            if wanted:
                self._hold_logprobs(slots[some], wanted, index)

    def _hold_logprobs(self, slots: Slots, wanted: list[tuple[int, LogprobArrays]], index: int) -> None:
        """Keep the logprobs of the tokens at ``index`` of their streams' output until their rows are due.
        ``wanted``: rows of ``slots``, and the logprobs of the stream's output."""
        row = np.array([row for row, _ in wanted], np.int32)
        ids = np.stack([scores.ids[index] for _, scores in wanted])
        values = np.stack([scores.values[index] for _, scores in wanted])
        rank = np.array([scores.rank[index] for _, scores in wanted], np.int32)
        absent = np.arange(ids.shape[1]) > self.alternatives[slots[row]][:, None]
        ids[absent], values[absent] = -1, -np.inf
        held = self.table.length[slots] - self.table.sent[slots]
        self._logprobs_buffer.append(slots, held - 1, Logprobs(row, ids, values, rank).split())

    def _prompt_rows(self, slot: int, scores: LogprobArrays) -> StepRows:
        """Logprobs of a prompt from its second token on, in a row before that of the first output token."""
        positions = np.arange(1, len(scores.rank) + 1)
        return self._prompt_logprobs.rows(
            slots=np.full(len(positions), slot, np.intp),
            positions=positions,
            scored=Logprobs(
                np.arange(len(positions), dtype=np.int32), scores.ids, scores.values, scores.rank
            ).split(),
        )

    def _transfers(self, slots: Slots, events: StepEvents) -> dict[int, dict[int, KVTransferParams]]:
        """kv_transfer_params by API server and stream."""
        given: dict[int, dict[int, KVTransferParams]] = {}
        for entry, params in events.transfers:
            slot = slots[entry]
            given.setdefault(int(self.table.server[slot]), {})[int(self.table.stream[slot])] = params
        return given
