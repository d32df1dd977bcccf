"""vLLM's EngineCore in this process: every touch of vLLM's internals.

Nothing else in Penstock imports vLLM. What is used of it, and how, is listed by the contract test
(``tests/engine/vllm/test_contract.py``), which fails first when a version of vLLM moves a name.
"""

import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import numpy as np

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read at import: the core runs in this process
os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # its lines go where Penstock's go
# Read when PyTorch is imported: threads that wait between operators leave their cores to API servers.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import vllm.v1.engine as wire
from torch.distributed import FileStore  # type: ignore[attr-defined]
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMClientError
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor

from ...config.errors import ConfigError
from ...wire.arrays import F32, I32
from ...wire.frames import Finish
from ...wire.messages import Sampling, Submit
from ...wire.sockets import Place
from ..base import RequestRejected
from .grammars import make_backend

SEED_STEP = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: seeds of resumed streams lie far apart."""
SEED_MASK = (1 << 63) - 1
MEETING = timedelta(minutes=10)
"""How long a rank waits for the first one to say where it listens: all import vLLM before."""
WORKERS_END_S = 2.0
"""How long vLLM's worker processes have to end; the supervisor waits 5 s for the engine."""
REFUSALS = (ValueError, VLLMClientError)
"""What vLLM raises for what it cannot run."""
STOPPED, LENGTH, ABORTED = (
    wire.FinishReason.STOP,
    wire.FinishReason.LENGTH,
    wire.FinishReason.ABORT,
)


class Arguments(FlexibleArgumentParser):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """vLLM's parser, whose errors are the operator's."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"vLLM: {message}")


@dataclass(slots=True)
class Scores:
    """Logprobs of L tokens: ids int32[L, W], values float32[L, W], the token itself first; rank int32[L]."""

    ids: I32
    values: F32
    rank: I32


@dataclass(slots=True)
class Produced:
    """What one step gave: one entry per request with output, and the few facts that only some have."""

    ids: list[str]
    tokens: list[list[int]]
    ended: list[tuple[int, Finish | None]] = field(default_factory=list)
    """(entry, why it ended); None: by an error inside vLLM."""
    cached: list[tuple[int, int]] = field(default_factory=list)
    """(entry, prompt tokens found in the prefix cache) with a request's first output."""
    logprobs: list[tuple[int, Scores]] = field(default_factory=list)
    """(entry, logprobs of its tokens)"""
    prompts: list[tuple[int, Scores]] = field(default_factory=list)
    """(entry, logprobs of its prompt from the second token on)"""


@dataclass(slots=True)
class Counts:
    """What vLLM's scheduler has counted since the start."""

    steps: int = 0
    kv_usage: float = 0.0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class Core:
    """One EngineCore: requests in, produced tokens out."""

    def __init__(self, arguments: Sequence[str], rank: int, place: Place | None = None) -> None:
        """Loads the model. ``rank``: this engine's number; on a machine with several GPUs it takes the ones
        behind those of the ranks before it. ``place``: among the ranks that compute layers together. Raises
        ConfigError for arguments that vLLM refuses."""
        if place is not None:
            _meet(place)
        config = _config(arguments, rank)
        self._config = config
        self._lockstep = place is not None
        self._failed = False
        self._core = EngineCore(
            config, Executor.get_class(config), log_stats=True, executor_fail_callback=self._on_failure
        )
        self._generation_config = config.model_config.try_get_generation_config()
        self._eos = _eos_token_id(config.model_config)
        self.counts = Counts()

    def _on_failure(self) -> None:
        """A worker process of vLLM's is gone. Called in a thread of vLLM's."""
        self._failed = True

    def close(self) -> None:
        """End worker processes and connectors. ``EngineCore.shutdown`` would also collect garbage and give
        memory back, for seconds; the process ends next."""
        hurry = threading.Timer(WORKERS_END_S, _kill_workers)
        hurry.daemon = True
        hurry.start()
        self._core.model_executor.shutdown()
        self._core.scheduler.shutdown()

    # -- facts

    @property
    def max_model_len(self) -> int:
        return int(self._config.model_config.max_model_len)

    @property
    def vocab_size(self) -> int:
        return int(self._config.model_config.get_vocab_size())

    @property
    def max_num_seqs(self) -> int:
        return int(self._config.scheduler_config.max_num_seqs)

    @property
    def dtype(self) -> str:
        return str(self._config.model_config.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        return str(current_platform.get_device_name())

    @property
    def kv_cache_tokens(self) -> int:
        cache = self._config.cache_config
        return int(cache.num_gpu_blocks or 0) * int(cache.block_size)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """What ends a stream that asks for no more, as vLLM's input processor has it."""
        params = SamplingParams()
        params.update_from_generation_config(self._generation_config, self._eos)
        return tuple(sorted(params.all_stop_token_ids))

    # -- requests come and go

    def add(self, request_id: str, request: Submit) -> None:
        """Give vLLM a request. Raises RequestRejected when vLLM cannot run it."""
        prompt = np.frombuffer(request.prompt, "<i4").tolist()
        sampling = request.sampling
        params = self._params(sampling, request.resumed)
        core = self._core
        made, wave = core.preprocess_add_request(
            wire.EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=request.cache_salt,
                data_parallel_rank=None,
                priority=request.priority,
            )
        )
        if sampling.grammar is not None and request.resumed:
            delivered = prompt[-request.resumed :]
            waiting = made.structured_output_request
            advance = partial(_advanced, waiting._grammar, request_id, delivered)
            waiting.grammar = core.structured_output_manager.executor.submit(advance)
        core.add_request(made, wave)

    def _params(self, sampling: Sampling, resumed: int) -> Any:
        """What vLLM's input processor would make of a request, of which ``resumed`` tokens are generated."""
        seed = (sampling.seed + SEED_STEP * resumed) & SEED_MASK if sampling.seeded else None
        config = self._config
        try:
            params = SamplingParams(
                presence_penalty=sampling.presence_penalty,
                frequency_penalty=sampling.frequency_penalty,
                repetition_penalty=sampling.repetition_penalty,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                seed=seed,
                stop_token_ids=list(sampling.stop_token_ids),
                ignore_eos=sampling.ignore_eos,
                max_tokens=sampling.max_tokens - resumed,
                min_tokens=max(sampling.min_tokens - resumed, 0),
                logprobs=None if sampling.logprobs < 0 else sampling.logprobs,
                prompt_logprobs=None if sampling.prompt_logprobs < 0 else sampling.prompt_logprobs,
                detokenize=False,
                logit_bias=sampling.logit_bias,
                allowed_token_ids=None
                if sampling.allowed_token_ids is None
                else list(sampling.allowed_token_ids),
            )
            params.verify(config.model_config, config.speculative_config, None, None)
        except REFUSALS as error:
            raise RequestRejected(str(error)) from None
        params.update_from_generation_config(self._generation_config, self._eos)
        if sampling.bad_words:
            params._bad_words_token_ids = [list(word) for word in sampling.bad_words]
        if sampling.grammar is not None:
            manager = self._core.structured_output_manager
            if manager.backend is None:
                manager.backend = make_backend(config, manager.tokenizer)
            params.structured_outputs = StructuredOutputsParams(grammar=sampling.grammar)
        return params

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests; they have no output from here on. Unknown ones are ignored."""
        self._core.abort_requests(list(request_ids))

    # -- the step

    def has_work(self) -> bool:
        return self._failed or self._core.scheduler.has_requests() or bool(self._core.batch_queue)

    def step(self) -> Produced:
        """One iteration of vLLM's. Raises what it raises."""
        if self._failed:
            raise RuntimeError("a worker process of vLLM's has ended")
        outputs, executed = self._core.step_fn()
        self._core.post_step(executed)
        if self._lockstep and not executed:
            self.dummy_step()
        self.counts.steps += executed
        if not outputs:
            return Produced([], [])
        (given,) = outputs.values()  # one client: this engine
        if given.scheduler_stats is not None:
            self._count(given.scheduler_stats)
        return self._produced(given.outputs)

    def stalled(self) -> bool:
        """Whether requests wait for something that a step cannot hurry: a transfer, a grammar."""
        return bool(self._core.scheduler.has_unfinished_requests())

    def dummy_step(self) -> None:
        """A step without requests, for ranks that compute every layer together."""
        self._core.execute_dummy_batch()

    def _produced(self, outputs: Sequence[Any]) -> Produced:
        """One pass; only what most outputs have is read from all of them."""
        made = Produced([o.request_id for o in outputs], [o.new_token_ids for o in outputs])
        rare = [
            entry
            for entry, o in enumerate(outputs)
            if o.finish_reason is not None or o.events is not None or o.new_logprobs is not None
        ]
        for entry in rare:
            output = outputs[entry]
            if output.finish_reason is not None:
                made.ended.append((entry, _finish(output.finish_reason, output.stop_reason)))
            if output.events is not None:
                self._on_events(made, entry, output)
            if output.new_logprobs is not None:
                made.logprobs.append((entry, _scores(*output.new_logprobs[:3])))
        return made

    def _on_events(self, made: Produced, entry: int, output: Any) -> None:
        """A request was queued, scheduled or preempted since its last output, or this is its first one."""
        preempted = wire.EngineCoreEventType.PREEMPTED
        self.counts.preemptions += sum(event.type == preempted for event in output.events)
        if output.prefill_stats is not None:
            made.cached.append((entry, output.prefill_stats.num_cached_tokens))
        if output.new_prompt_logprobs_tensors is not None:
            tensors = output.new_prompt_logprobs_tensors[:3]
            made.prompts.append((entry, _scores(*(tensor.numpy() for tensor in tensors))))

    def _count(self, stats: Any) -> None:
        counts = self.counts
        counts.kv_usage = stats.kv_cache_usage
        counts.prefix_queries += stats.prefix_cache_stats.queries
        counts.prefix_hits += stats.prefix_cache_stats.hits
        drafted = stats.spec_decoding_stats
        if drafted is not None:
            counts.drafts += drafted.num_drafts
            counts.draft_tokens += drafted.num_draft_tokens
            counts.accepted_tokens += drafted.num_accepted_tokens

    # -- operations

    def reset_prefix_cache(self) -> bool:
        """False while requests use it."""
        return bool(self._core.reset_prefix_cache())

    @property
    def can_sleep(self) -> bool:
        return bool(self._config.model_config.enable_sleep_mode)

    def sleep(self, level: int) -> None:
        """Give the device's memory back; called while there is no work."""
        self._core.model_executor.sleep(level)

    def wake_up(self) -> None:
        self._core.model_executor.wake_up(None)


def _meet(place: Place) -> None:
    """Have vLLM join its ranks' process groups: it reads from the environment where the first one listens."""
    store = FileStore(place.rendezvous, place.size)
    store.set_timeout(MEETING)
    if place.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as free:
            store.set("port", str(free.getsockname()[1]))
    os.environ["VLLM_DP_SIZE"] = str(place.size)
    os.environ["VLLM_DP_RANK"] = os.environ["VLLM_DP_RANK_LOCAL"] = str(place.rank)
    os.environ["VLLM_DP_MASTER_IP"] = "127.0.0.1"
    os.environ["VLLM_DP_MASTER_PORT"] = store.get("port").decode()


def _config(arguments: Sequence[str], rank: int) -> Any:
    parser = EngineArgs.add_cli_args(Arguments(prog="vLLM", add_help=False))
    parsed = EngineArgs.from_cli_args(parser.parse_args(list(arguments)))
    if parsed.data_parallel_size != 1 or parsed.data_parallel_rank is not None:
        raise ConfigError("--data-parallel-size is Penstock's: set it before --")
    try:
        config = parsed.create_engine_config()
    except REFUSALS as error:
        raise ConfigError(f"vLLM: {error}") from error
    backend = config.structured_outputs_config.backend
    if backend not in ("auto", "guidance"):
        raise ConfigError(
            f"--structured-outputs-config.backend {backend}: grammars are llguidance's here, leave it out"
        )
    config.parallel_config.data_parallel_rank_local = rank
    config.parallel_config.data_parallel_index = rank
    return config


def _kill_workers() -> None:
    for process in multiprocessing.active_children():
        process.kill()


def _eos_token_id(model_config: Any) -> int | None:
    if model_config.skip_tokenizer_init:
        return None
    eos: int | None = cached_tokenizer_from_config(model_config).eos_token_id
    return eos


def _finish(reason: Any, stop_reason: int | str | None) -> Finish | None:
    if reason == LENGTH:
        return Finish.LENGTH
    if reason == STOPPED:
        return Finish.EOS if stop_reason is None else Finish.STOP_TOKEN
    return Finish.ABORT if reason == ABORTED else None


def _scores(ids: Any, values: Any, rank: Any) -> Scores:
    return Scores(np.asarray(ids, np.int32), np.asarray(values, np.float32), np.asarray(rank, np.int32))


def _advanced(compiled: "Future[Any]", request_id: str, delivered: list[int]) -> Any:
    """The grammar behind ``delivered``. Runs in the thread that compiled it before."""
    grammar = compiled.result()
    grammar.accept_tokens(request_id, delivered)
    return grammar
