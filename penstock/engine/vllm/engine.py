"""The vllm engine: vLLM's scheduler, KV cache, kernels and executors, behind Penstock's Engine interface."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.config.serve import ServeConfig
from penstock.engine.base import ACCEPTED_PER_POSITION, Load, RequestRejected, StepRows, StreamFailure
from penstock.engine.batch.logprobs import LogprobsBuffer
from penstock.engine.batch.prompt_logprobs import PromptLogprobsState
from penstock.engine.batch.rows import concat_rows
from penstock.engine.batch.slots import SlotTable
from penstock.engine.lora.adapter_table import AdapterTable, adapter_of
from penstock.engine.schedule.submit_checks import check_request
from penstock.engine.schedule.waiting_queue import WaitingQueue, WaitingStream
from penstock.engine.torch.profiler import TorchProfiler
from penstock.engine.vllm.adapter_copies import AdapterCopies
from penstock.engine.vllm.adapter_loader import VllmAdapterLoader, request_of
from penstock.engine.vllm.arguments import arguments
from penstock.engine.vllm.base_shapes import BaseShapes
from penstock.engine.vllm.internals import VllmCore
from penstock.engine.vllm.startup_progress import startup_progress
from penstock.engine.vllm.step_output import TokenLogprobs, VllmStepOutput
from penstock.wire.arrays import I8, I32
from penstock.wire.frames import FinishReason
from penstock.wire.kv_events import KVCacheEvent
from penstock.wire.logprobs import Logprobs
from penstock.wire.messages import KVTransferParams, Submit, WireError
from penstock.wire.sockets import ProcessGroupSpec

Slots = NDArray[np.intp]

STALLED_WAIT_S = 0.001
"""Seconds that a step without output waits while requests wait for a transfer or a grammar; as in vLLM."""


class VllmEngine:
    """Streams wait in Penstock's queue for a slot; requests with a slot are in vLLM, which schedules them.

    vLLM also decides when a stream finishes. Its output is appended to the slots' histories once per step,
    and rows are made from there as in every engine, by each stream's output interval.
    """

    # -- lifetime: process

    def __init__(
        self,
        config: ServeConfig,
        model_dir: str,
        progress: Callable[[str, float | None], None],
        *,
        run_dir: str,
        rank: int = 0,
        given: Sequence[str] = (),
        group: ProcessGroupSpec | None = None,
    ) -> None:
        """Loads the model. ``run_dir``: where copies of adapters are kept. ``given``: fields of ``config``
        that the operator has set. ``group``: the process group of the ranks that experts are split over,
        which all load at the same time; None: this rank runs alone. Raises ConfigError."""
        vllm_arguments = arguments(config, model_dir, given)
        with startup_progress(progress):
            self._core = core = VllmCore(vllm_arguments, rank, group)
        self.info = core.info()
        self._table = table = SlotTable(
            self.info.max_num_seqs, self.info.max_model_len, (), vocab_size=self.info.vocab_size
        )
        self._loader: VllmAdapterLoader | None = None
        self.adapters: AdapterTable | None = None
        lora = self.info.lora
        if lora is not None:
            copies = AdapterCopies(run_dir, rank)
            self._loader = VllmAdapterLoader(core, lora, copies, BaseShapes(model_dir))
            self.adapters = AdapterTable(self._loader, lora.max_cpu_loras)
        self.can_sleep = core.can_sleep
        self._profiler = TorchProfiler(core.device_type)
        self._queue = WaitingQueue(config)
        self._logprobs_buffer = LogprobsBuffer(table)
        self._prompt_logprobs = PromptLogprobsState(table)
        self._alternatives = np.full(table.size, -1, np.int32)
        """Candidates per token that a slot's stream wants beside the token itself; -1: no logprobs."""
        self._slots: dict[str, int] = {}
        """Slot of each request, by its id in vLLM."""
        self._request_ids: dict[int, str] = {}
        """The reverse."""
        self._latest: tuple[list[str], Slots] = [], np.zeros(0, np.intp)
        """The request ids of the latest step, and their slots."""
        self._num_added = 0
        """Requests given to vLLM since the start; the next request's id."""
        self._aborted: dict[int, None] = {}
        """Slots of aborted streams."""
        self._broken = False
        """A step of vLLM's has raised."""

    def close(self) -> None:
        self._core.close()

    # -- streams come and go

    def submit(self, server: int, request: Submit) -> None:
        if self._table.find(server, request.stream) is not None:
            raise WireError(f"Submit.stream {request.stream} is running already")
        check_request(request, self._table.max_model_len, self.info.vocab_size)
        self._queue.push(server, request, self._table.free_count(), adapter_of(request, self.adapters))

    def abort(self, server: int, streams: Sequence[int]) -> None:
        for stream in streams:
            if self._queue.abort(server, stream):
                continue
            slot = self._table.find(server, stream)
            if slot is not None:
                self._aborted[slot] = None

    def drop_server(self, server: int) -> None:
        self._queue.drop_server(server)
        slots = self._table.slots_of(server)
        self._core.abort([self._request_ids[slot] for slot in slots])
        self._release(slots)

    def take_admitted(self) -> Sequence[tuple[int, int]]:
        return self._table.take_admitted()

    def take_preempted(self) -> Sequence[tuple[int, int]]:
        return self._table.take_preempted()

    def take_kv_events(self) -> Sequence[KVCacheEvent]:
        """vLLM publishes them itself."""
        return ()

    def on_resubmitted_start(self, notify: Callable[[int, int], None]) -> None:
        self._table.notify_start = notify

    def fail_all(self, code: str, message: str) -> StepRows:
        if not self._broken:
            self._core.abort(list(self._slots))
        wanting = self._alternatives >= 0
        for slot in list(self._request_ids):
            self._clear(slot)
        rows = self._table.fail_all(
            code, message, lambda slots: self._logprobs_buffer.take_held(slots, wanting)
        )
        rows.failed = [*rows.failed, *self._queue.fail_all(code, message)]
        return rows

    def _admit(self) -> None:
        """Give vLLM as many waiting requests as there are free slots."""
        while self._queue and self._table.free_count():
            first = next(iter(self._queue))
            request_id = str(self._num_added)
            try:
                self._core.add(request_id, first.request, request_of(first.adapter))
            except RequestRejected as error:
                self._queue.fail(first, error.code, str(error))
                continue
            self._num_added += 1
            self._begin(first, request_id)

    def _begin(self, first: WaitingStream, request_id: str) -> None:
        self._queue.remove(first)
        slot = self._table.allocate(first.server, first.request, first.adapter)
        self._alternatives[slot] = first.request.sampling.logprobs
        self._slots[request_id] = slot
        self._request_ids[slot] = request_id

    def _release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._clear(slot)
            self._table.release(slot)

    def _clear(self, slot: int) -> None:
        del self._slots[self._request_ids.pop(slot)]
        self._alternatives[slot] = -1
        self._aborted.pop(slot, None)

    # -- the step

    def has_work(self) -> bool:
        queue = self._queue
        return bool(self._aborted or queue or queue.has_finished()) or self._core.has_work()

    def step(self) -> StepRows:
        """Admit waiting streams, run a step of vLLM's, settle its output. Raises what vLLM raises."""
        parts = [self._take_aborted()] if self._aborted else []
        self._admit()
        if self._queue.has_finished():
            parts.append(self._queue.take_finished())
        try:
            output = self._core.step()
        except Exception:
            self._broken = True
            raise
        if output.ids:
            parts += self._settle(output)
        elif self._core.stalled():
            time.sleep(STALLED_WAIT_S)
        return concat_rows(parts)

    def dummy_step(self) -> None:
        self._core.dummy_step()

    def _take_aborted(self) -> StepRows:
        """The ends of aborted streams, with their held tokens; frees their slots."""
        slots = list(self._aborted)
        self._core.abort([self._request_ids[slot] for slot in slots])
        rows = self._table.rows(np.array(slots, np.intp), np.full(len(slots), FinishReason.ABORT, np.int8))
        self._release(slots)
        return rows

    def _settle(self, output: VllmStepOutput) -> list[StepRows]:
        """Append vLLM's output to the slots, make the rows that are due, and free slots of ended streams."""
        slots = self._slots_of(output.ids)
        finish = np.zeros(len(slots), np.int8)
        failed = []
        for entry, reason in output.ended:
            if reason is None:
                failed.append(int(slots[entry]))
            else:
                finish[entry] = reason
        for entry in output.preempted:
            self._table.note_preemption(int(slots[entry]))
        for entry, cached in output.cached:
            self._table.cached[slots[entry]] = cached
        parts = [self._prompt_rows(int(slots[entry]), scores) for entry, scores in output.prompts]
        for slot in failed:
            self._table.flush_next(slot)
        parts.append(self._rows(slots, finish, output))
        parts[-1].failed = [self._failure(slot) for slot in failed]
        if output.transfers:
            parts[-1].kv_transfer_params = self._transfers(slots, output)
        self._release([*slots[finish != 0].tolist(), *failed])
        return parts

    def _slots_of(self, request_ids: list[str]) -> Slots:
        """Slots of ``request_ids``, which are mostly those of the previous step; ids are never reused."""
        if request_ids != self._latest[0]:
            slots = self._slots
            self._latest = request_ids, np.array([slots[name] for name in request_ids], np.intp)
        return self._latest[1]

    def _rows(self, slots: Slots, finish: I8, output: VllmStepOutput) -> StepRows:
        """Append the tokens and make the rows that are due."""
        table, tokens = self._table, output.tokens
        each = np.fromiter(chain.from_iterable(tokens), np.int32)
        if len(each) == len(tokens) and all(tokens):
            self._append(slots, each, output, 0)
        else:  # accepted draft tokens: one token of each stream at a time
            count = np.fromiter(map(len, tokens), np.intp, len(tokens))
            starts = count.cumsum() - count
            for index in range(int(count.max())):
                some = np.flatnonzero(count > index)
                self._append(slots[some], each[starts[some] + index], output, index, some)
        if not output.logprobs:
            return table.rows(slots, finish)
        due = table.due(slots, finish)
        logprobs = self._logprobs_buffer.take_due(slots, due, self._alternatives[slots] >= 0)
        rows = table.rows(slots, finish)
        rows.logprobs = logprobs
        return rows

    def _append(
        self, slots: Slots, tokens: I32, output: VllmStepOutput, index: int, some: Slots | None = None
    ) -> None:
        """Append one token to each slot, the one at ``index`` of its stream's tokens in ``output``. ``some``:
        the slots' entries in ``output``; None: all entries."""
        self._table.append(slots, tokens)
        if not output.logprobs:
            return
        entries = range(len(slots)) if some is None else some.tolist()
        row_of = {entry: row for row, entry in enumerate(entries)}
        wanted = [(row_of[entry], scores) for entry, scores in output.logprobs if entry in row_of]
        if wanted:
            row = np.array([row for row, _ in wanted], np.int32)
            ids = np.stack([scores.ids[index] for _, scores in wanted])
            values = np.stack([scores.values[index] for _, scores in wanted])
            rank = np.array([scores.rank[index] for _, scores in wanted], np.int32)
            absent = np.arange(ids.shape[1]) > self._alternatives[slots[row]][:, None]
            ids[absent], values[absent] = -1, -np.inf
            held = self._table.length[slots] - self._table.sent[slots]
            self._logprobs_buffer.append(slots, held - 1, Logprobs(row, ids, values, rank).split())

    def _prompt_rows(self, slot: int, scores: TokenLogprobs) -> StepRows:
        """Logprobs of a prompt from its second token on, in a row before that of the first output token."""
        positions = np.arange(1, len(scores.rank) + 1)
        return self._prompt_logprobs.rows(
            slots=np.full(len(positions), slot, np.intp),
            positions=positions,
            scored=Logprobs(
                np.arange(len(positions), dtype=np.int32), scores.ids, scores.values, scores.rank
            ).split(),
        )

    def _transfers(self, slots: Slots, output: VllmStepOutput) -> dict[int, dict[int, KVTransferParams]]:
        """kv_transfer_params by API server and stream."""
        given: dict[int, dict[int, KVTransferParams]] = {}
        for entry, params in output.transfers:
            slot = slots[entry]
            given.setdefault(int(self._table.server[slot]), {})[int(self._table.stream[slot])] = params
        return given

    def _failure(self, slot: int) -> StreamFailure:
        return self._table.failure(
            slot, "engine_error", "vLLM ended this request by an error; the engine's log says more"
        )

    # -- reporting

    def load(self) -> Load:
        return Load(
            waiting=len(self._queue),
            running=self._table.running(),
            kv_used=self._core.counts.kv_usage,
            generated=self._table.generated,
        )

    def metrics(self) -> dict[str, float]:
        counts = self._core.counts
        per_position = {
            f"{ACCEPTED_PER_POSITION}{place}": count
            for place, count in enumerate(counts.accepted_per_position)
        }
        return {
            "preemptions_total": counts.preemptions,
            "prefix_cache_queries_total": counts.prefix_queries,
            "prefix_cache_hits_total": counts.prefix_hits,
            "external_prefix_cache_queries_total": counts.external_queries,
            "external_prefix_cache_hits_total": counts.external_hits,
            "external_prompt_tokens_total": counts.external_prompt_tokens,
            "spec_decode_drafts_total": counts.drafts,
            "spec_decode_draft_tokens_total": counts.draft_tokens,
            "spec_decode_accepted_tokens_total": counts.accepted_tokens,
            **per_position,
        }

    def call(self, method: str, arguments: dict[str, Any]) -> Any:
        core = self._core
        if method in ("sleep", "wake_up") and not core.can_sleep:
            raise ValueError("vLLM's engine sleeps only when it is started with -- --enable-sleep-mode")
        match method:
            case "reset_prefix_cache":
                if not core.reset_prefix_cache():
                    raise ValueError("the prefix cache cannot be reset while requests use it; try again")
            case "sleep":
                core.reset_prefix_cache()
                core.sleep(arguments["level"])
            case "wake_up":
                if core.wake_up() and self._loader is not None:
                    self._loader.restore()
            case "start_profile":
                self._profiler.start()
            case "stop_profile":
                return self._profiler.stop(arguments["path"])
            case _:
                raise ValueError(f"the vllm engine has no operation {method!r}")
