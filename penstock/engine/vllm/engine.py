"""vLLM's engine under Penstock's wire: its scheduler, KV cache, kernels and executors; not its servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.config.options import ServeConfig
from penstock.engine.base import Load, RequestRejected, StepRows, StreamFailure
from penstock.engine.batch.logprobs import LogprobsBuffer
from penstock.engine.batch.prompt_logprobs import PromptLogprobsState
from penstock.engine.batch.rows import concat_rows
from penstock.engine.batch.slots import SlotTable
from penstock.engine.schedule.request_checks import check_request
from penstock.engine.schedule.waiting_queue import WaitingQueue, WaitingStream
from penstock.engine.torch.profiler import TorchProfiler
from penstock.engine.vllm.arguments import arguments
from penstock.engine.vllm.internals import VllmCore
from penstock.engine.vllm.lora_modules import parse_lora_modules
from penstock.engine.vllm.startup_progress import startup_progress
from penstock.engine.vllm.step_output import TokenLogprobs, VllmStepOutput
from penstock.wire.arrays import I8
from penstock.wire.frames import FinishReason
from penstock.wire.logprobs import Logprobs
from penstock.wire.messages import EngineInfo, KVTransferParams, Submit, WireError
from penstock.wire.sockets import ProcessGroupSpec

Slots = NDArray[np.intp]

STALLED_WAIT_S = 0.001
"""How long a step that computed nothing waits for what its requests wait for (vLLM waits as long)."""


class VllmEngine:
    """Streams wait here and get a slot; a request with a slot is vLLM's, which decides when it runs.

    vLLM decides when a stream ends, too. Its output is put into the slots' columns once per step, from where
    rows are made as for every engine: by the interval that each stream has.
    """

    # -- lifetime: process

    def __init__(
        self,
        config: ServeConfig,
        model_dir: str,
        progress: Callable[[str, float | None], None],
        *,
        rank: int = 0,
        given: Sequence[str] = (),
        place: ProcessGroupSpec | None = None,
    ) -> None:
        """Loads the model. ``given``: the fields of ``config`` that the operator set. ``place``: this rank's
        among those over which experts are split, and which all load at the same time. Raises ConfigError."""
        names = config.served_model_name or [config.model or ""]
        adapters, own = parse_lora_modules(arguments(config, model_dir, given), names)
        with startup_progress(progress):
            self._core = core = VllmCore(own, rank, place, adapters)
        self._info = EngineInfo(
            engine="vllm",
            max_model_len=core.max_model_len,
            vocab_size=core.vocab_size,
            max_num_seqs=core.max_num_seqs,
            eos_token_ids=core.eos_token_ids,
            device=core.device,
            dtype=core.dtype,
            kv_cache_tokens=core.kv_cache_tokens,
            adapters=adapters,
            transfers_kv=core.transfers_kv,
            max_loras=core.max_loras,
        )
        self._table = table = SlotTable(core.max_num_seqs, core.max_model_len, ())
        self.can_sleep = core.can_sleep
        self._trace = TorchProfiler(core.device_type)
        self._queue = WaitingQueue(config)
        self._held = LogprobsBuffer(table)
        self._prompts = PromptLogprobsState(table)
        self._alternatives = np.full(table.size, -1, np.int32)
        """Candidates per token that a slot's stream wants beside the token itself; -1: no logprobs."""
        self._slots: dict[str, int] = {}
        """vLLM's name of a request to its slot."""
        self._names: dict[int, str] = {}
        self._latest: tuple[list[str], Slots] = [], np.zeros(0, np.intp)
        """The names of the latest step's requests, and their slots."""
        self._named = 0
        """Requests that were ever given to vLLM, which numbers them."""
        self._aborted: dict[int, None] = {}
        self._broken = False

    @property
    def info(self) -> EngineInfo:
        return self._info

    def close(self) -> None:
        self._core.close()

    # -- streams come and go

    def submit(self, server: int, request: Submit) -> None:
        if self._table.find(server, request.stream) is not None:
            raise WireError(f"Submit.stream {request.stream} is running already")
        check_request(request, self._table.max_model_len, self._info.vocab_size, self._info.adapters)
        self._queue.push(server, request, self._table.free_count())

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
        self._core.abort([self._names[slot] for slot in slots])
        self._release(slots)

    def take_admitted(self) -> Sequence[tuple[int, int]]:
        return self._table.take_admitted()

    def fail_all(self, code: str, message: str) -> StepRows:
        if not self._broken:
            self._core.abort(list(self._slots))
        for slot in list(self._names):
            self._clear(slot)
        rows = self._table.fail_all(code, message)
        rows.failed = [*rows.failed, *self._queue.fail_all(code, message)]
        return rows

    def _admit(self) -> None:
        """Give vLLM as many of the waiting requests as there are slots."""
        while self._queue and self._table.free_count():
            first = next(iter(self._queue))
            name = str(self._named)
            try:
                self._core.add(name, first.request)
            except RequestRejected as error:
                self._queue.fail(first, error.code, str(error))
                continue
            self._named += 1
            self._begin(first, name)

    def _begin(self, first: WaitingStream, name: str) -> None:
        self._queue.remove(first)
        slot = self._table.allocate(first.server, first.request)
        self._alternatives[slot] = first.request.sampling.logprobs
        self._slots[name] = slot
        self._names[slot] = name

    def _release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._clear(slot)
            self._table.release(slot)

    def _clear(self, slot: int) -> None:
        del self._slots[self._names.pop(slot)]
        self._alternatives[slot] = -1
        self._aborted.pop(slot, None)

    # -- the step

    def has_work(self) -> bool:
        queue = self._queue
        return bool(self._aborted or queue or queue.has_finished()) or self._core.has_work()

    def step(self) -> StepRows:
        """Admit, run, settle. Raises what vLLM raises."""
        parts = [self._take_aborted()] if self._aborted else []
        self._admit()
        if self._queue.has_finished():
            parts.append(self._queue.take_finished())
        try:
            produced = self._core.step()
        except Exception:
            self._broken = True
            raise
        if produced.ids:
            parts += self._process_outputs(produced)
        elif self._core.stalled():
            time.sleep(STALLED_WAIT_S)
        return concat_rows(parts)

    def dummy_step(self) -> None:
        self._core.dummy_step()

    def _take_aborted(self) -> StepRows:
        """The ends of streams that were aborted, with the tokens they still held."""
        slots = list(self._aborted)
        self._core.abort([self._names[slot] for slot in slots])
        rows = self._table.rows(np.array(slots, np.intp), np.full(len(slots), FinishReason.ABORT, np.int8))
        self._release(slots)
        return rows

    def _process_outputs(self, produced: VllmStepOutput) -> list[StepRows]:
        """Into the slots with all that vLLM gave, and the rows of what is due."""
        slots = self._slots_of(produced.ids)
        finish = np.zeros(len(slots), np.int8)
        failed = []
        for entry, reason in produced.ended:
            if reason is None:
                failed.append(int(slots[entry]))
            else:
                finish[entry] = reason
        for entry, cached in produced.cached:
            self._table.cached[slots[entry]] = cached
        parts = [self._prompt_rows(int(slots[entry]), scores) for entry, scores in produced.prompts]
        for slot in failed:
            self._table.flush_next(slot)
        parts.append(self._rows(slots, finish, produced))
        parts[-1].failed = [self._fail(slot) for slot in failed]
        if produced.transfers:
            parts[-1].kv_transfer_params = self._transfers(slots, produced)
        self._release([*slots[finish != 0].tolist(), *failed])
        return parts

    def _slots_of(self, names: list[str]) -> Slots:
        """Mostly the same as of the step before; a name is never another request's."""
        if names != self._latest[0]:
            named = self._slots
            self._latest = names, np.array([named[name] for name in names], np.intp)
        return self._latest[1]

    def _rows(self, slots: Slots, finish: I8, produced: VllmStepOutput) -> StepRows:
        """Append the tokens and make the rows that are due."""
        table, tokens = self._table, produced.tokens
        each = list(chain.from_iterable(tokens))
        if len(each) == len(tokens) and all(tokens):
            self._append(slots, each, produced, 0)
        else:  # drafts were accepted: one token of each stream at a time
            count = np.fromiter(map(len, tokens), np.intp, len(tokens))
            for place in range(int(count.max())):
                some = np.flatnonzero(count > place)
                self._append(slots[some], [tokens[entry][place] for entry in some], produced, place, some)
        if not produced.logprobs:
            return table.rows(slots, finish)
        due = table.due(slots, finish)
        logprobs = self._held.take_due(slots, due, self._alternatives[slots] >= 0)
        rows = table.rows(slots, finish)
        rows.logprobs = logprobs
        return rows

    def _append(
        self, slots: Slots, tokens: list[int], produced: VllmStepOutput, place: int, some: Slots | None = None
    ) -> None:
        """Append one token to each slot; it stands at ``place`` of what vLLM gave for it. ``some``: the
        slots' entries in ``produced``, where they are not all of them."""
        self._table.append(slots, np.array(tokens, np.int32))
        if not produced.logprobs:
            return
        where = range(len(slots)) if some is None else some.tolist()
        index = {entry: row for row, entry in enumerate(where)}
        wanted = [(index[entry], scores) for entry, scores in produced.logprobs if entry in index]
        if wanted:
            row = np.array([row for row, _ in wanted], np.int32)
            ids = np.stack([scores.ids[place] for _, scores in wanted])
            values = np.stack([scores.values[place] for _, scores in wanted])
            rank = np.array([scores.rank[place] for _, scores in wanted], np.int32)
            absent = np.arange(ids.shape[1]) > self._alternatives[slots[row]][:, None]
            ids[absent], values[absent] = -1, -np.inf
            self._held.append(slots, Logprobs(row, ids, values, rank))

    def _prompt_rows(self, slot: int, scores: TokenLogprobs) -> StepRows:
        """The logprobs of a prompt's tokens but the first, in a row before the one of its first token."""
        places = np.arange(1, len(scores.rank) + 1)
        return self._prompts.rows(
            np.full(len(places), slot, np.intp), places, scores.ids, scores.values, scores.rank
        )

    def _transfers(self, slots: Slots, produced: VllmStepOutput) -> dict[int, dict[int, KVTransferParams]]:
        """By API server and stream."""
        given: dict[int, dict[int, KVTransferParams]] = {}
        for entry, params in produced.transfers:
            slot = slots[entry]
            given.setdefault(int(self._table.server[slot]), {})[int(self._table.stream[slot])] = params
        return given

    def _fail(self, slot: int) -> StreamFailure:
        return self._table.failure(
            slot, "engine_error", "vLLM ended this request by an error; the engine's log says more"
        )

    # -- what it reports

    def load(self) -> Load:
        return Load(len(self._queue), self._table.running(), self._core.counts.kv_usage)

    def metrics(self) -> dict[str, float]:
        counts = self._core.counts
        return {
            "steps_total": counts.steps,
            "preemptions_total": counts.preemptions,
            "prefix_cache_queries_total": counts.prefix_queries,
            "prefix_cache_hits_total": counts.prefix_hits,
            "spec_decode_drafts_total": counts.drafts,
            "spec_decode_draft_tokens_total": counts.draft_tokens,
            "spec_decode_accepted_tokens_total": counts.accepted_tokens,
            "requests_waiting": len(self._queue),
            "requests_running": self._table.running(),
            "kv_cache_usage": counts.kv_usage,
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
                core.wake_up()
            case "start_profile":
                self._trace.start()
            case "stop_profile":
                return self._trace.stop(arguments["path"])
            case _:
                raise ValueError(f"the vllm engine has no operation {method!r}")
