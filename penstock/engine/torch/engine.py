"""The torch engine: continuous batching of a supported Hugging Face causal LM, on a CPU or a CUDA device."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig
from penstock.engine.base import Hold, Load, StepRows
from penstock.engine.batch.rows import concat_rows
from penstock.engine.batch.slots import SlotTable
from penstock.engine.kv_events.block_log import BlockLog
from penstock.engine.lora.adapter_table import AdapterTable, LoadedAdapter
from penstock.engine.media.page_supply import PageSupply
from penstock.engine.sampling.grammar_compiler import GrammarCompiler
from penstock.engine.sampling.metadata import NOT_COUNTED, SamplingMetadata
from penstock.engine.schedule.batch import Batch
from penstock.engine.schedule.bisection import run_apart
from penstock.engine.schedule.block_tables import BlockTables
from penstock.engine.schedule.scheduler import Scheduler
from penstock.engine.speculation.ngram import NgramProposer
from penstock.engine.speculation.proposer import Proposer
from penstock.engine.speculation.speculation import Speculation
from penstock.engine.speculation.suffix import SuffixProposer
from penstock.engine.torch.device import DevicePlace, device_name, place_rank, step_threads
from penstock.engine.torch.draft.draft_loader import load_draft_model, read_draft_shape
from penstock.engine.torch.draft.draft_model import DraftModel
from penstock.engine.torch.expert_parallel import ExpertParallel
from penstock.engine.torch.largest_step import run_largest_steps
from penstock.engine.torch.lora.adapter_reader import AdapterReader
from penstock.engine.torch.lora.lora_layers import LoraLayers
from penstock.engine.torch.media.families import is_whole_only, seeing_family
from penstock.engine.torch.media.picture_encoder import feature_bytes, make_media
from penstock.engine.torch.memory import (
    bytes_per_token,
    cache_budget,
    empty_cache,
    num_cache_blocks,
)
from penstock.engine.torch.model import PagedModel
from penstock.engine.torch.model_loader import Head, ModelShape, pick_dtype, read_shape
from penstock.engine.torch.model_runner import ModelRunner, PendingOutput
from penstock.engine.torch.out_of_memory import (
    describe_memory,
    drop_frames,
    in_brief,
    is_out_of_memory,
    stating_shortage,
)
from penstock.engine.torch.process_group import ProcessGroup
from penstock.engine.torch.profiler import TorchProfiler
from penstock.engine.torch.sampling.penalties import TokenCounts
from penstock.engine.torch.weight_loader import TorchWeightLoader, start_source
from penstock.engine.vocabulary import read_eos_token_ids
from penstock.logging_setup import RateLimitedLog
from penstock.metrics.freed_memory import keep_freed_memory
from penstock.wire.kv_events import KVCacheEvent
from penstock.wire.messages import EngineInfo, LoraInfo, Submit
from penstock.wire.sockets import ProcessGroupSpec, Wakeup

GRAMMAR_WAIT_S = 0.002
"""Seconds that a step waits for a grammar's compilation when it has nothing to compute."""
CANNOT_COMPUTE = "The model cannot compute this request:"
NO_MEMORY = (
    "The device has no memory to compute this request, even by itself; a lower --gpu-memory-utilization or "
    "--kv-cache-memory, or fewer --max-num-batched-tokens, leave it more:"
)

log = logging.getLogger(__name__)
_log_fault = RateLimitedLog(log, logging.ERROR)
_log_shortage = RateLimitedLog(log, logging.WARNING)


class TorchEngine:
    """Continuous batching with chunked prefill over a paged KV cache."""

    wakeups: Sequence[Wakeup] = ()

    can_sleep = True

    # -- lifetime: process

    def __init__(
        self,
        config: ServeConfig,
        model_dir: str,
        progress: Callable[[str, float | None], None],
        *,
        tokenizer_dir: str | None = None,
        draft_dir: str | None = None,
        rank: int = 0,
        group: ProcessGroupSpec | None = None,
        pages: PageSupply | None = None,
    ) -> None:
        """Load the model. ``tokenizer_dir`` contains tokenizer.json; None: ``model_dir`` does.
        ``draft_dir``: the draft model, for ``--speculative-method draft``. ``rank``: the data-parallel rank,
        which chooses the device. ``group``: the process group of the ranks that experts are split over, which
        all load at the same time; None: this rank runs alone. ``pages``: of pictures; None: text alone is
        taken.

        Raises ConfigError for errors that a restart would not cure.
        """
        progress("loading PyTorch", None)
        keep_freed_memory()
        torch.set_num_threads(step_threads(config, torch.device("cpu")))  # to load the weights
        place = place_rank(config, rank)
        device = self.device = place.device
        if device.type == "cuda":
            with stating_shortage("making a CUDA context", "end other processes on the device", device):
                torch.cuda.set_device(device)  # kernels, events and pinned memory belong to the current one
        shape = read_shape(model_dir)
        max_model_len = _max_model_len(config, shape)
        dtype = pick_dtype(config, shape.dtype, device)
        draft_shape = None
        if draft_dir is not None:
            draft_shape = read_draft_shape(config, draft_dir, model_dir, tokenizer_dir or model_dir)
        self._group = None
        if group is not None:
            progress("meeting the other ranks", 0.1)
            self._group = ProcessGroup(group, device)
        experts = None if self._group is None else ExpertParallel(self._group)
        progress("loading weights", 0.2)
        sees = pages is not None and seeing_family(Path(model_dir), config) is not None
        head: Head = "seeing" if sees or is_whole_only(Path(model_dir)) else "text"
        model = PagedModel(model_dir, config, shape, dtype=dtype, device=device, experts=experts, head=head)
        self._models, per_token = [model], [bytes_per_token(shape, dtype)]
        if draft_dir is not None and draft_shape is not None:
            self._models.append(load_draft_model(config, draft_dir, draft_shape, dtype, device))
            per_token.append(bytes_per_token(draft_shape, dtype))
        later = TokenCounts.most_bytes(config.max_num_seqs, shape.vocab_size) + feature_bytes(model, config)
        blocks = self._make_caches(config, place, per_token, max_model_len, later)
        torch.set_num_threads(step_threads(config, device))
        if device.type == "cuda":
            log.info("with the KV cache and CUDA graphs: %s", describe_memory(device))
        self._profiler = TorchProfiler(device.type)
        eos = read_eos_token_ids(Path(model_dir))
        self._table = SlotTable(config.max_num_seqs, max_model_len, eos, vocab_size=shape.vocab_size)
        self._sampling = SamplingMetadata(
            self._table,
            shape.vocab_size,
            GrammarCompiler(shape.vocab_size, eos, Path(tokenizer_dir or model_dir) / "tokenizer.json"),
        )
        self._blocks = BlockTables(config.max_num_seqs, blocks, config.block_size, max_model_len)
        self._block_log = BlockLog(blocks, config.block_size) if config.kv_events.publishes else None
        lora = None if model.lora is None else _lora_info(config, model.lora)
        self.adapters = None if lora is None else self._make_adapters(config, lora, dtype)
        self._draft_model: DraftModel | None
        self._scheduler = Scheduler(
            self._table,
            self._sampling,
            self._blocks,
            config,
            block_log=self._block_log,
            adapters=self.adapters,
            speculation=self._make_speculation(config, device),
        )
        self._scheduler.streams.keep_routes(model.recorder.routes)
        self.media = make_media(model, self._table, pages if sees else None, config)
        self._scheduler.take_pictures(self.media)
        room = self._scheduler.adapter_room
        self._awaited_adapters: dict[int, LoadedAdapter] = {}
        """Adapters by place: those that the next step with their streams brings to the device."""
        if room is not None:
            room.put = self._put_adapter
        self._runner = ModelRunner(
            model, self._blocks, self._sampling, device, room.places if room else None, self.media
        )
        if self._draft_model is not None:
            self._draft_model.sampler = self._runner.sampler
        self.weights = self._make_weight_loader(config, model_dir)
        self._in_flight: deque[tuple[Batch, PendingOutput]] = deque()
        self._steps_ahead = _steps_ahead(config, device)
        self.info = EngineInfo(
            engine="torch",
            max_model_len=max_model_len,
            vocab_size=shape.vocab_size,
            max_num_seqs=config.max_num_seqs,
            eos_token_ids=eos,
            device=device_name(device),
            dtype=str(dtype).removeprefix("torch."),
            kv_cache_tokens=blocks * config.block_size,
            cache_config=_cache_config(config, dtype, blocks),
            lora=lora,
            media=None if self.media is None else self.media.info,
        )
        if self._group is not None:
            self._group.barrier(progress)

    def _make_caches(
        self,
        config: ServeConfig,
        place: DevicePlace,
        per_token: Sequence[int],
        max_model_len: int,
        later: int,
    ) -> int:
        """Allocate the KV cache of all models, which leaves ``later`` bytes free. Returns its blocks without
        the null block."""
        budget = cache_budget(
            config,
            place,
            lambda: run_largest_steps(self._models, config, max_model_len, self.device),
            lambda memory: sum(each.graph_bytes(memory) for each in self._models),
            later,
        )
        blocks = num_cache_blocks(config, per_token, max_model_len, budget)
        for each in self._models:
            each.make_cache(blocks + 1, config.block_size)
        return blocks

    def _make_adapters(self, config: ServeConfig, lora: LoraInfo, dtype: torch.dtype) -> AdapterTable:
        pinned = self.device.type == "cuda"
        reader = AdapterReader(lora, dtype, pinned=pinned, on_remove=self._forget_adapter)
        return AdapterTable(reader, config.max_cpu_loras)

    def _make_weight_loader(self, config: ServeConfig, model_dir: str) -> TorchWeightLoader:
        return TorchWeightLoader(
            self._models[0],
            start_source(model_dir, config.load_format),
            self._drop_cache,
            lambda tick: None if self._group is None else self._group.meet(tick),
        )

    def _make_speculation(self, config: ServeConfig, device: torch.device) -> Speculation | None:
        self._draft_model = None
        match config.speculative_method:
            case "none":
                return None
            case "ngram":
                proposer: Proposer = NgramProposer(self._table)
            case "suffix":
                proposer = SuffixProposer(self._table)
            case "draft":
                most = config.max_num_batched_tokens
                proposer = self._draft_model = DraftModel(
                    self._models[1], self._blocks, self._sampling, device, most
                )
        tokens = None if config.speculative_tokens == "auto" else config.speculative_tokens
        return Speculation(self._table, self._sampling, proposer, tokens)

    @property
    def model(self) -> PagedModel:
        """The model of its text."""
        return self._models[0]

    @property
    def pages(self) -> PageSupply | None:
        return None if self.media is None else self.media.pages

    def close(self) -> None:
        """Leave the process group, and finish writing pages. Memory is freed with the process."""
        if self.pages is not None:
            self.pages.close()
        if self._group is not None:
            self._group.close()

    # -- streams come and go

    def submit(self, server: int, request: Submit) -> None:
        self._scheduler.submit(server, request)

    def abort(self, server: int, streams: Sequence[int]) -> None:
        self._scheduler.abort(server, streams)

    def drop_server(self, server: int) -> None:
        self._scheduler.drop_server(server)

    def take_admitted(self) -> Sequence[tuple[int, int]]:
        return self._table.take_admitted()

    def take_preempted(self) -> Sequence[tuple[int, int]]:
        return self._table.take_preempted()

    def take_kv_events(self) -> Sequence[KVCacheEvent]:
        return () if self._block_log is None else self._block_log.take_events()

    def on_resubmitted_start(self, notify: Callable[[int, int], None]) -> None:
        self._table.notify_start = notify

    def fail_all(self, code: str, message: str) -> StepRows:
        self._in_flight.clear()
        return self._scheduler.fail_all(code, message)

    # -- the step

    def has_work(self) -> bool:
        return bool(self._in_flight) or self._scheduler.has_work()

    def can_step(self) -> bool:
        return bool(self._in_flight) or self._scheduler.can_step()

    def hold(self, hold: Hold) -> None:
        self._scheduler.hold(hold)

    def flush(self) -> StepRows:
        return self._scheduler.flush()

    def step(self) -> StepRows:
        """Schedule a batch, launch it, settle it, or with async scheduling the batch before it."""
        rows = [self._scheduler.take_aborted()]
        batch = self._scheduler.schedule()
        rows += self._launch(batch)
        rows += self._settle_after_launch(batch)
        return concat_rows(rows)

    def dummy_step(self) -> None:
        """A forward pass in which this rank's experts compute the other ranks' tokens."""
        self._runner.dummy_run()

    def _launch(self, batch: Batch) -> list[StepRows]:
        """Start the forward pass of a batch; of an empty one, only what other ranks or grammars wait for.
        Returns rows only of a batch that fails."""
        if len(batch):
            fault = self._try_launch(batch)
            if fault is not None:
                return self._run_apart(batch, lacks_memory=is_out_of_memory(fault))
            self._scheduler.mark_launched(batch)
        elif self._group is not None:
            self._runner.dummy_run()
        elif not self._in_flight:
            self._sampling.grammars.wait(GRAMMAR_WAIT_S)
        return []

    def _try_launch(self, batch: Batch) -> Exception | None:
        """Return what the batch fails with."""
        try:
            self._in_flight.append((batch, self._launch_whole(batch)))
        except Exception as error:
            if self._group is not None:  # the other ranks wait within the forward pass
                raise
            if is_out_of_memory(error):
                tokens = int(batch.count.sum())
                _log_shortage("memory", "no memory for a step of %d tokens: %s", tokens, in_brief(error))
            else:
                _log_fault("batch", "a batch has failed; its streams are computed apart", exc_info=True)
            return error
        return None

    def _launch_whole(self, batch: Batch) -> PendingOutput:
        """Launch a batch; one that fails leaves nothing behind."""
        try:
            self._bring_adapters(batch)
            return self._runner.launch(batch)
        except Exception as error:
            drop_frames(error)
            self._sampling.counted[batch.slots] = NOT_COUNTED  # tokens may be counted twice
            raise

    def _run_apart(self, batch: Batch, *, lacks_memory: bool) -> list[StepRows]:
        """Compute the streams of a batch that has failed in smaller ones, and end those that fail by
        themselves; those without memory are tried again later, and the next steps are smaller. Raises if the
        model cannot compute anything: then no stream is the cause."""
        rows = self._settle(0)
        if lacks_memory:
            empty_cache(self.device)
        self._runner.check_device()
        largest, complete = 0, True
        for part, result in run_apart(self._scheduler.running_parts(batch), self._launch_whole):
            if isinstance(result, Exception):
                complete = False
                rows.append(self._end_or_set_aside(part, result))
                continue
            self._in_flight.append((part, result))
            self._scheduler.mark_launched(part)
            rows += self._settle(0)
            largest = max(largest, int(part.count.sum()))
        if lacks_memory and complete and largest:
            self._scheduler.shrink_steps(largest)
        return rows

    def _end_or_set_aside(self, part: Batch, fault: Exception) -> StepRows:
        if is_out_of_memory(fault):
            empty_cache(self.device)
            self._runner.check_device()
            return self._scheduler.set_aside(part, f"{NO_MEMORY} {in_brief(fault)}")
        self._runner.check_device()
        if len(part) > 1:  # too many batches fail
            raise fault
        return self._scheduler.fail(part, f"{CANNOT_COMPUTE} {in_brief(fault)}")

    def _settle_after_launch(self, batch: Batch) -> list[StepRows]:
        """Settle all batches but those that may stay in flight. None may when there is nothing to run ahead
        of, or when prompt logprobs are to be read in the step that computed them."""
        settle_all = not len(batch) or not self._in_flight or self._in_flight[-1][1].scored is not None
        return self._settle(0 if settle_all else self._steps_ahead)

    def _settle(self, left: int) -> list[StepRows]:
        """Read the tokens of all but the last ``left`` batches in flight, and give them to the scheduler."""
        rows = []
        while len(self._in_flight) > left:
            batch, pending = self._in_flight.popleft()
            tokens, logprobs = pending.read_tokens()
            if pending.scored is not None:
                rows.append(pending.scored.read_rows(self._sampling.prompt_logprobs))
            buffer = self._scheduler.streams.routes
            if pending.routes is not None and buffer is not None:
                pending.routes.write_to(buffer)
            rows.append(self._scheduler.update_from_output(batch, tokens, logprobs))
        return rows

    # -- adapters

    def _put_adapter(self, place: int, loaded: LoadedAdapter) -> None:
        self._awaited_adapters[place] = loaded

    @torch.inference_mode()
    def _bring_adapters(self, batch: Batch) -> None:
        """Bring the adapters of a batch to their places: there may be no memory for the copies."""
        room, lora = self._scheduler.adapter_room, self._models[0].lora
        if not self._awaited_adapters or room is None or lora is None:
            return
        for place in self._awaited_adapters.keys() & set(room.places[batch.slots].tolist()):
            lora.put(place, self._awaited_adapters[place].weights)
            del self._awaited_adapters[place]

    def _forget_adapter(self, loaded: LoadedAdapter) -> None:
        self._scheduler.prefix_cache.forget(loaded.key)

    # -- reporting

    def load(self) -> Load:
        scheduler = self._scheduler
        return Load(
            waiting=scheduler.waiting(),
            running=scheduler.running(),
            kv_used=self._blocks.usage(),
            deferred=scheduler.deferred(),
            generated=self._table.generated,
        )

    def metrics(self) -> dict[str, float]:
        return self._scheduler.metrics()

    def call(self, method: str, arguments: dict[str, Any]) -> Any:
        match method:
            case "reset_prefix_cache":
                self._scheduler.reset_caches()
            case "sleep":
                self._scheduler.reset_caches()
                if self._scheduler.adapter_room is not None:
                    self._scheduler.adapter_room.clear()
                self._runner.sampler.free()
                for model in self._models:
                    model.sleep(drop_weights=arguments["level"] > 1)
            case "wake_up":
                self._wake_up()
            case "start_profile":
                self._profiler.start()
            case "stop_profile":
                return self._profiler.stop(arguments["path"])
            case _:
                raise ValueError(f"the torch engine has no operation {method!r}")
        return None

    def _wake_up(self) -> None:
        """Wake all models. Raises what :meth:`PagedModel.wake_up` raises; all are then asleep as before."""
        dropped = self._models[0].parameters is None
        awake = []
        try:
            for model in self._models:
                model.wake_up()
                awake.append(model)
            if dropped:
                self.weights.on_started()
        except BaseException:
            for model in awake:
                model.sleep(drop_weights=True)
            raise

    def _drop_cache(self) -> None:
        """Forget what is computed; streams that run are computed again, as after a preemption."""
        self._scheduler.preempt_all()
        self._scheduler.reset_caches()


def _cache_config(config: ServeConfig, dtype: torch.dtype, blocks: int) -> dict[str, str]:
    """Labels of vLLM's ``vllm:cache_config_info``."""
    return {
        "block_size": str(config.block_size),
        "cache_dtype": str(dtype).removeprefix("torch."),
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "gpu_memory_utilization": str(config.gpu_memory_utilization),
        "kv_cache_memory_bytes": str(config.kv_cache_memory),
        "num_gpu_blocks": str(blocks),
    }


def _lora_info(config: ServeConfig, layers: LoraLayers) -> LoraInfo:
    return LoraInfo(config.max_loras, config.max_lora_rank, config.max_cpu_loras, layers.sizes)


def _max_model_len(config: ServeConfig, shape: ModelShape) -> int:
    if config.max_model_len is None:
        return shape.max_positions
    if config.max_model_len > shape.max_positions:
        raise ConfigError(
            f"--max-model-len {config.max_model_len}: the model takes at most {shape.max_positions} tokens"
        )
    return config.max_model_len


def _steps_ahead(config: ServeConfig, device: torch.device) -> int:
    """Batches that stay in flight after a step (async scheduling): 1 or 0. A CPU gains nothing by it."""
    wanted = device.type == "cuda" if config.async_scheduling == "auto" else config.async_scheduling == "on"
    return int(wanted)
