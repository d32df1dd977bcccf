"""All uses of vLLM's internals: vLLM's EngineCore, run in this process.

Nothing else in Penstock imports vLLM or reads its objects. The supported versions are in :mod:`.versions`, a
separate module because the supervisor checks them and must not import PyTorch; an engine checks them before
it imports this module. The contract test (``tests/engine/vllm/test_contract.py``) lists everything that is
used of vLLM, and fails with its name when a version changes it.
"""

from __future__ import annotations

import logging
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
import torch

from penstock.adapters.errors import AdapterError
from penstock.config.errors import ConfigError
from penstock.engine.base import RequestRejected
from penstock.engine.vllm.seeds import seed_of
from penstock.engine.vllm.step_output import TokenLogprobs, VllmCounters, VllmStepOutput
from penstock.wire.frames import FinishReason
from penstock.wire.messages import CACHE_CONFIG_LABELS, EngineInfo, LoraInfo, Submit
from penstock.wire.sockets import ProcessGroupSpec

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read at import: the core runs in this process
os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # vLLM's log lines go through Penstock's logging
# Read when PyTorch is imported: threads that wait between operators leave their cores to API servers.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import vllm.v1.engine as vllm_engine
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

WORKERS_END_S = 2.0
"""Seconds for vLLM's worker processes to end; the supervisor waits 5 s for the engine."""
REFUSALS = (ValueError, VLLMClientError)
"""Exceptions with which vLLM refuses a request or a configuration."""
BACKEND = "guidance"
"""vLLM's name for llguidance."""
NEVER_EVICTED = 1 << 31
"""Adapters that vLLM may keep: more than there are. Penstock bounds them, and vLLM must not drop one that
streams use: it would read the files again in the middle of a step."""
MAX_REASON_CHARS = 600
"""Of vLLM's own words on an adapter."""
DROPS_WEIGHTS = 2
"""The sleep level at which vLLM drops the model's weights."""
STOPPED, LENGTH, ABORTED = (
    vllm_engine.FinishReason.STOP,
    vllm_engine.FinishReason.LENGTH,
    vllm_engine.FinishReason.ABORT,
)


class VllmArgumentParser(FlexibleArgumentParser):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """vLLM's argument parser, which raises ConfigError."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"vLLM: {message}")


class LlguidanceBackend(GuidanceBackend):  # type: ignore[misc]  # likewise
    """vLLM's llguidance backend for grammars that need no translation.

    API servers send validated llguidance grammars. vLLM's own backend would take them for Lark or GBNF and
    wrap them again, so this one compiles them as they are.
    """

    def compile_grammar(
        self, request_type: Any, grammar_spec: str, stop_token_ids: set[int] | None = None
    ) -> Any:
        """Raises ValueError for a grammar that llguidance refuses; vLLM then fails the request."""
        level = int(os.environ.get("LLGUIDANCE_LOG_LEVEL", "0"))
        matcher = llguidance.LLMatcher(self.ll_tokenizer, grammar_spec, log_level=level)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return GuidanceGrammar(ll_matcher=matcher, ll_tokenizer=self.ll_tokenizer, vocab_size=self.vocab_size)


class AdapterRequest(LoRARequest, array_like=True, omit_defaults=True):  # type: ignore[call-arg,misc]  # likewise
    """A LoRA adapter as vLLM's requests name it.

    ``lora_name`` is the adapter's name, which vLLM's KV events carry. vLLM keeps prefix caches apart by name
    and ``lora_path``, which each version of an adapter has of its own. vLLM's own class compares by name
    alone: of two versions that run in one step, vLLM would activate one.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AdapterRequest) and self.lora_int_id == other.lora_int_id

    def __hash__(self) -> int:
        return int(self.lora_int_id)


class VllmCore:
    """One EngineCore: requests in, tokens out."""

    def __init__(
        self,
        arguments: Sequence[str],
        rank: int,
        group: ProcessGroupSpec | None = None,
    ) -> None:
        """Loads the model. ``rank``: the engine's data-parallel rank; it uses the GPUs after
        those of the lower ranks. ``group``: the process group of ranks that share the model's layers. Raises
        ConfigError for arguments that vLLM refuses."""
        if group is not None and current_platform.is_cpu():
            raise ConfigError(
                "--enable-expert-parallel: vLLM's CPU build cannot exchange tokens between engines; "
                "behind -- it splits experts over the workers of one engine"
            )
        if group is not None:
            set_process_group_environment(group)
        config = _config(arguments, rank)
        self._config = config
        self._lora = _take_over_adapters(config)
        self._sleep_level = 0
        self._in_group = group is not None
        """Other ranks wait for this one in every step."""
        self._failed = False
        self._core = EngineCore(
            config, Executor.get_class(config), log_stats=True, executor_fail_callback=self._on_failure
        )
        self._generation_config = config.model_config.try_get_generation_config()
        self._eos = _eos_token_id(config.model_config)
        self.counts = VllmCounters()

    def _on_failure(self) -> None:
        """A worker process of vLLM's has ended. Called in a thread of vLLM's."""
        self._failed = True

    def close(self) -> None:
        """End worker processes and connectors. ``EngineCore.shutdown`` would also collect garbage and free
        memory, which takes seconds; the process ends next anyway."""
        kill_timer = threading.Timer(WORKERS_END_S, _kill_workers)
        kill_timer.daemon = True
        kill_timer.start()
        self._core.model_executor.shutdown()
        self._core.scheduler.shutdown()

    # -- facts

    def info(self) -> EngineInfo:
        """The engine's facts, from vLLM's configuration."""
        config = self._config
        model, cache = config.model_config, config.cache_config
        default = SamplingParams()  # its stop tokens are set as vLLM's input processor does
        default.update_from_generation_config(self._generation_config, self._eos)
        return EngineInfo(
            engine="vllm",
            max_model_len=int(model.max_model_len),
            vocab_size=int(model.get_vocab_size()),
            max_num_seqs=int(config.scheduler_config.max_num_seqs),
            eos_token_ids=tuple(sorted(default.all_stop_token_ids)),
            device=str(current_platform.get_device_name()),
            dtype=str(model.dtype).removeprefix("torch."),
            kv_cache_tokens=int(cache.num_gpu_blocks or 0) * int(cache.block_size),
            cache_config={name: str(getattr(cache, name)) for name in CACHE_CONFIG_LABELS},
            transfers_kv=config.kv_transfer_config is not None,
            lora=self._lora,
        )

    @property
    def device_type(self) -> str:
        """PyTorch's name of the device type."""
        return str(current_platform.device_type)

    # -- requests come and go

    def add(self, request_id: str, request: Submit, adapter: AdapterRequest | None = None) -> None:
        """Give vLLM a request that runs with ``adapter``. Raises RequestRejected when vLLM cannot run it."""
        prompt = np.frombuffer(request.prompt, "<i4").tolist()
        sampling = request.sampling
        core = self._core
        try:
            params = self._params(request)
            made, wave = core.preprocess_add_request(
                vllm_engine.EngineCoreRequest(
                    request_id=request_id,
                    prompt_token_ids=prompt,
                    mm_features=None,
                    sampling_params=params,
                    pooling_params=None,
                    arrival_time=time.time(),
                    lora_request=adapter,
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
        """The SamplingParams that vLLM's input processor would make for a request. Raises REFUSALS."""
        sampling, resumed, transfer = request.sampling, request.resumed, request.kv_transfer_params
        config = self._config
        params = SamplingParams(
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=seed_of(request),
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
        """Abort requests; they have no further output. Unknown ones are ignored."""
        self._core.abort_requests(list(request_ids))

    # -- adapters, between steps

    @property
    def largest_weight(self) -> float:
        """Largest value of the dtype in which vLLM keeps adapters."""
        return float(torch.finfo(self._config.lora_config.lora_dtype).max)

    def add_adapter(self, name: str, number: int, path: str) -> AdapterRequest:
        """Load the adapter in the directory ``path``, which stays as it is until the adapter is removed.
        Raises AdapterError with vLLM's reason; vLLM then has nothing of it."""
        request = AdapterRequest(lora_name=name, lora_int_id=number, lora_path=path)
        replies: list[str | None] = self._core.model_executor.collective_rpc(_load_adapter, args=(request,))
        refused = [reply for reply in replies if reply is not None]
        if refused:
            self.remove_adapter(number)
            raise AdapterError(f"vLLM: {refused[0]}")
        return request

    def remove_adapter(self, number: int) -> None:
        """Have vLLM forget an adapter, also one that it does not have."""
        self._core.model_executor.remove_lora(number)

    # -- the step

    def has_work(self) -> bool:
        return self._failed or self._core.scheduler.has_requests() or bool(self._core.batch_queue)

    def step(self) -> VllmStepOutput:
        """One step of vLLM's engine. Raises RuntimeError when a worker has ended, and what vLLM raises."""
        if self._failed:
            raise RuntimeError("a worker process of vLLM's has ended")
        outputs, executed = self._core.step_fn()
        self._core.post_step(executed)
        if self._in_group and not executed:
            self.dummy_step()
        if not outputs:
            return VllmStepOutput([], [])
        (given,) = outputs.values()  # one client: this engine
        if given.scheduler_stats is not None:
            self.counts.add(given.scheduler_stats)
        return self._convert(given.outputs)

    def stalled(self) -> bool:
        """Whether requests wait for something that no step advances: a transfer, a grammar."""
        return bool(self._core.scheduler.has_unfinished_requests())

    def dummy_step(self) -> None:
        """A step without requests, for the other ranks of the process group."""
        self._core.execute_dummy_batch()

    def _convert(self, outputs: Sequence[Any]) -> VllmStepOutput:
        """Convert vLLM's EngineCoreOutputs in one pass; rare fields are read only where they are set."""
        made = VllmStepOutput([o.request_id for o in outputs], [o.new_token_ids for o in outputs])
        rare = [
            entry
            for entry, o in enumerate(outputs)
            if o.finish_reason is not None or o.events is not None or o.new_logprobs is not None
        ]
        for entry in rare:
            output = outputs[entry]
            if output.finish_reason is not None:
                made.events.ended.append((entry, _finish(output.finish_reason, output.stop_reason)))
                if output.kv_transfer_params:
                    encoded = msgspec.json.encode(output.kv_transfer_params, enc_hook=str)
                    made.events.transfers.append((entry, encoded))
            if output.events is not None:
                self._on_events(made, entry, output)
            if output.new_logprobs is not None:
                made.events.logprobs.append((entry, _scores(*output.new_logprobs[:3])))
        return made

    def _on_events(self, made: VllmStepOutput, entry: int, output: Any) -> None:
        """Read an output with events: the request was queued, scheduled or preempted since its last output,
        or this is its first one."""
        preempted = vllm_engine.EngineCoreEventType.PREEMPTED
        times = sum(event.type == preempted for event in output.events)
        made.events.preempted += [entry] * times
        self.counts.preemptions += times
        if output.prefill_stats is not None:
            made.events.cached.append((entry, output.prefill_stats.num_cached_tokens))
            self.counts.external_prompt_tokens += output.prefill_stats.num_external_cached_tokens
        if output.new_prompt_logprobs_tensors is not None:
            tensors = output.new_prompt_logprobs_tensors[:3]
            made.events.prompts.append((entry, _scores(*(tensor.numpy() for tensor in tensors))))

    # -- operations

    def reset_prefix_cache(self) -> bool:
        """Returns False, and does nothing, while requests use it."""
        return bool(self._core.reset_prefix_cache())

    @property
    def can_sleep(self) -> bool:
        return bool(self._config.model_config.enable_sleep_mode)

    @property
    def is_asleep(self) -> bool:
        return self._sleep_level > 0

    def sleep(self, level: int) -> None:
        """Free the device's memory; called while there is no work."""
        self._core.model_executor.sleep(level)
        self._sleep_level = max(level, self._sleep_level)

    def wake_up(self) -> bool:
        """Take the memory back, and read the weights again if they were dropped. Returns whether vLLM has
        lost its adapters."""
        executor = self._core.model_executor
        executor.wake_up(None)
        lost = self._sleep_level >= DROPS_WEIGHTS
        if lost:
            executor.collective_rpc("reload_weights")
        self._sleep_level = 0
        return lost


def _take_over_adapters(config: Any) -> LoraInfo | None:
    """What ``config`` says of adapters; None: they are off. vLLM keeps those that Penstock has loaded."""
    lora = config.lora_config
    if lora is None:
        return None
    info = LoraInfo(int(lora.max_loras), int(lora.max_lora_rank), int(lora.max_cpu_loras))
    lora.max_cpu_loras = NEVER_EVICTED
    return info


def _load_adapter(worker: Any, request: AdapterRequest) -> str | None:
    """Load an adapter in one of vLLM's workers. Returns why that failed, instead of raising: of several
    workers that raise, the executor takes the first one's reply and leaves the others for the next call."""
    try:
        worker.add_lora(request)
    except Exception as error:  # whatever the adapter's files bring about
        logging.getLogger(__name__).debug("adapter %s", request.lora_name, exc_info=True)
        reason = " ".join(str(error).split())[:MAX_REASON_CHARS]
        return f"{type(error).__name__}: {reason}"
    return None


def _config(arguments: Sequence[str], rank: int) -> Any:
    """vLLM's configuration for its command line's ``arguments``. Raises ConfigError."""
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
    """The compiled grammar, advanced by the tokens ``delivered``. Runs in the thread that compiled it."""
    grammar = compiled.result()
    grammar.accept_tokens(request_id, delivered)
    return grammar
