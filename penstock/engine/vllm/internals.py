"""Every touch of vLLM's internals: its EngineCore in this process.

Nothing else in Penstock imports vLLM or reads what its objects hold. It is made for the versions in
:mod:`.versions`, a module apart because the supervisor looks at them and must not import PyTorch; an engine
checks them before it imports this. What is used of vLLM, and how, is listed by the contract test
(``tests/engine/vllm/test_contract.py``), which fails first, with its name, when a version moves something.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NoReturn

import llguidance
import msgspec
import numpy as np

from penstock.config.errors import ConfigError
from penstock.engine.base import RequestRejected
from penstock.engine.vllm.step_output import TokenLogprobs, VllmCounters, VllmStepOutput
from penstock.wire.frames import FinishReason
from penstock.wire.messages import Adapter, Submit
from penstock.wire.sockets import ProcessGroupSpec

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read at import: the core runs in this process
os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # its lines go where Penstock's go
# Read when PyTorch is imported: threads that wait between operators leave their cores to API servers.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import vllm.v1.engine as wire
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.structured_output.backend_guidance import GuidanceBackend, GuidanceGrammar

from penstock.engine.vllm.process_group import set_process_group_environment

SEED_STEP = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: seeds of resumed streams lie far apart."""
SEED_MASK = (1 << 63) - 1
WORKERS_END_S = 2.0
"""How long vLLM's worker processes have to end; the supervisor waits 5 s for the engine."""
REFUSALS = (ValueError, VLLMClientError)
"""What vLLM raises for what it cannot run."""
BACKEND = "guidance"
"""vLLM's name of llguidance."""
STOPPED, LENGTH, ABORTED = (
    wire.FinishReason.STOP,
    wire.FinishReason.LENGTH,
    wire.FinishReason.ABORT,
)


class VllmArgumentParser(FlexibleArgumentParser):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """vLLM's parser, whose errors are the operator's."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"vLLM: {message}")


class LlguidanceBackend(GuidanceBackend):  # type: ignore[misc]  # likewise
    """vLLM's backend for llguidance, for grammars that need no translation.

    API servers send llguidance's own texts, validated. vLLM's own backend would take them for Lark or GBNF
    and wrap them once more, so this one compiles them as they are.
    """

    def compile_grammar(
        self, request_type: Any, grammar_spec: str, stop_token_ids: set[int] | None = None
    ) -> Any:
        """Raises ValueError for a grammar that llguidance refuses; vLLM ends its request with an error."""
        level = int(os.environ.get("LLGUIDANCE_LOG_LEVEL", "0"))
        matcher = llguidance.LLMatcher(self.ll_tokenizer, grammar_spec, log_level=level)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return GuidanceGrammar(ll_matcher=matcher, ll_tokenizer=self.ll_tokenizer, vocab_size=self.vocab_size)


class VllmCore:
    """One EngineCore: requests in, produced tokens out."""

    def __init__(
        self,
        arguments: Sequence[str],
        rank: int,
        place: ProcessGroupSpec | None = None,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        """Loads the model and what it may run with. ``rank``: this engine's number; on a machine with several
        GPUs it takes the ones behind those of the ranks before it. ``place``: among the ranks that compute
        layers together. Raises ConfigError for arguments that vLLM refuses, and for adapters."""
        if place is not None and current_platform.is_cpu():
            raise ConfigError(
                "--enable-expert-parallel: vLLM's CPU build cannot exchange tokens between engines; "
                "behind -- it splits experts over the workers of one engine"
            )
        if place is not None:
            set_process_group_environment(place)
        config = _config(arguments, rank)
        self._config = config
        self._lockstep = place is not None
        self._failed = False
        self._core = EngineCore(
            config, Executor.get_class(config), log_stats=True, executor_fail_callback=self._on_failure
        )
        self._generation_config = config.model_config.try_get_generation_config()
        self._eos = _eos_token_id(config.model_config)
        self.counts = VllmCounters()
        self._adapters = {adapter.name: self._load(adapter, at + 1) for at, adapter in enumerate(adapters)}

    def _load(self, adapter: Adapter, number: int) -> LoRARequest:
        """Before any request names it, as a request would break the engine with what cannot be loaded."""
        if self._config.lora_config is None:
            raise ConfigError("--lora-modules needs vLLM's --enable-lora behind --")
        request = LoRARequest(adapter.name, number, adapter.path)
        try:
            self._core.add_lora(request)
        except Exception as error:  # vLLM's loader raises what it meets, a worker process RuntimeError
            raise ConfigError(f"--lora-modules {adapter.name}={adapter.path}: {error}") from error
        return request

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
    def device_type(self) -> str:
        """As PyTorch has it."""
        return str(current_platform.device_type)

    @property
    def kv_cache_tokens(self) -> int:
        cache = self._config.cache_config
        return int(cache.num_gpu_blocks or 0) * int(cache.block_size)

    @property
    def max_loras(self) -> int:
        """Adapters that run at the same time."""
        return 0 if self._config.lora_config is None else int(self._config.lora_config.max_loras)

    @property
    def transfers_kv(self) -> bool:
        return self._config.kv_transfer_config is not None

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
        core = self._core
        try:
            params = self._params(request)
            made, wave = core.preprocess_add_request(
                wire.EngineCoreRequest(
                    request_id=request_id,
                    prompt_token_ids=prompt,
                    mm_features=None,
                    sampling_params=params,
                    pooling_params=None,
                    arrival_time=time.time(),
                    lora_request=request.adapter and self._adapters[request.adapter],
                    cache_salt=request.cache_salt,
                    data_parallel_rank=None,
                    priority=request.priority,
                )
            )
        except REFUSALS as error:
            raise RequestRejected(str(error)) from None
        if sampling.grammar is not None and request.resumed:
            delivered = prompt[-request.resumed :]
            waiting = made.structured_output_request
            advance = partial(_advanced, waiting._grammar, request_id, delivered)
            waiting.grammar = core.structured_output_manager.executor.submit(advance)
        core.add_request(made, wave)

    def _params(self, request: Submit) -> Any:
        """What vLLM's input processor would make of a request. Raises what vLLM refuses it with."""
        sampling, resumed, transfer = request.sampling, request.resumed, request.kv_transfer_params
        seed = (sampling.seed + SEED_STEP * resumed) & SEED_MASK if sampling.seeded else None
        config = self._config
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
            extra_args=None if transfer is None else {"kv_transfer_params": msgspec.json.decode(transfer)},
            allowed_token_ids=None
            if sampling.allowed_token_ids is None
            else list(sampling.allowed_token_ids),
        )
        params.verify(config.model_config, config.speculative_config, None, None)
        params.update_from_generation_config(self._generation_config, self._eos)
        if sampling.bad_words:
            params._bad_words_token_ids = [list(word) for word in sampling.bad_words]
        if sampling.grammar is not None:
            manager = self._core.structured_output_manager
            if manager.backend is None:
                size = config.model_config.get_vocab_size()
                manager.backend = LlguidanceBackend(config, tokenizer=manager.tokenizer, vocab_size=size)
            params.structured_outputs = asked = StructuredOutputsParams(grammar=sampling.grammar)
            asked._backend = BACKEND
        return params

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests; they have no output from here on. Unknown ones are ignored."""
        self._core.abort_requests(list(request_ids))

    # -- the step

    def has_work(self) -> bool:
        return self._failed or self._core.scheduler.has_requests() or bool(self._core.batch_queue)

    def step(self) -> VllmStepOutput:
        """One iteration of vLLM's. Raises what it raises."""
        if self._failed:
            raise RuntimeError("a worker process of vLLM's has ended")
        outputs, executed = self._core.step_fn()
        self._core.post_step(executed)
        if self._lockstep and not executed:
            self.dummy_step()
        self.counts.steps += executed
        if not outputs:
            return VllmStepOutput([], [])
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

    def _produced(self, outputs: Sequence[Any]) -> VllmStepOutput:
        """One pass; only what most outputs have is read from all of them."""
        made = VllmStepOutput([o.request_id for o in outputs], [o.new_token_ids for o in outputs])
        rare = [
            entry
            for entry, o in enumerate(outputs)
            if o.finish_reason is not None or o.events is not None or o.new_logprobs is not None
        ]
        for entry in rare:
            output = outputs[entry]
            if output.finish_reason is not None:
                made.ended.append((entry, _finish(output.finish_reason, output.stop_reason)))
                if output.kv_transfer_params:
                    said = msgspec.json.encode(output.kv_transfer_params, enc_hook=str)
                    made.transfers.append((entry, said))
            if output.events is not None:
                self._on_events(made, entry, output)
            if output.new_logprobs is not None:
                made.logprobs.append((entry, _scores(*output.new_logprobs[:3])))
        return made

    def _on_events(self, made: VllmStepOutput, entry: int, output: Any) -> None:
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


def _config(arguments: Sequence[str], rank: int) -> Any:
    parser = EngineArgs.add_cli_args(VllmArgumentParser(prog="vLLM", add_help=False))
    parsed = EngineArgs.from_cli_args(parser.parse_args(list(arguments)))
    if parsed.data_parallel_size != 1 or parsed.data_parallel_rank is not None:
        raise ConfigError("--data-parallel-size is Penstock's: set it before --")
    try:
        config = parsed.create_engine_config()
    except REFUSALS as error:
        raise ConfigError(f"vLLM: {error}") from error
    backend = config.structured_outputs_config.backend
    if backend not in ("auto", BACKEND):
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


def _finish(reason: Any, stop_reason: int | str | None) -> FinishReason | None:
    if reason == LENGTH:
        return FinishReason.LENGTH
    if reason == STOPPED:
        return FinishReason.EOS if stop_reason is None else FinishReason.STOP_TOKEN
    return FinishReason.ABORT if reason == ABORTED else None


def _scores(ids: Any, values: Any, rank: Any) -> TokenLogprobs:
    return TokenLogprobs(
        np.asarray(ids, np.int32), np.asarray(values, np.float32), np.asarray(rank, np.int32)
    )


def _advanced(compiled: Future[Any], request_id: str, delivered: list[int]) -> Any:
    """The grammar behind ``delivered``. Runs in the thread that compiled it before."""
    grammar = compiled.result()
    grammar.accept_tokens(request_id, delivered)
    return grammar
