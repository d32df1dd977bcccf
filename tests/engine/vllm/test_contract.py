"""Every name of vLLM's that Penstock uses, and how: a version that moves one fails here with its name."""

from __future__ import annotations

import dataclasses
import inspect
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock.engine.vllm import internals, process_group
from penstock.wire.messages import CACHE_CONFIG_LABELS

CALLS: dict[str, tuple[str, ...]] = {
    "vllm.engine.arg_utils:EngineArgs.add_cli_args": ("parser",),
    "vllm.engine.arg_utils:EngineArgs.from_cli_args": ("args",),
    "vllm.engine.arg_utils:EngineArgs.create_engine_config": (),
    "vllm.tokenizers:cached_tokenizer_from_config": ("model_config",),
    "vllm.sampling_params:SamplingParams.verify": (
        "model_config",
        "speculative_config",
        "structured_outputs_config",
        "tokenizer",
    ),
    "vllm.sampling_params:SamplingParams.update_from_generation_config": (
        "generation_config",
        "eos_token_id",
    ),
    "vllm.sampling_params:StructuredOutputsParams": ("grammar",),
    "vllm.utils.argparse_utils:FlexibleArgumentParser.error": ("message",),
    "vllm.v1.engine.core:EngineCore": (
        "vllm_config",
        "executor_class",
        "log_stats",
        "executor_fail_callback",
    ),
    "vllm.v1.engine.core:EngineCore.preprocess_add_request": ("request",),
    "vllm.v1.engine.core:EngineCore.add_request": ("request", "request_wave"),
    "vllm.platforms.interface:Platform.is_cpu": (),
    "vllm.lora.request:LoRARequest": ("lora_name", "lora_int_id", "lora_path"),
    "vllm.v1.worker.worker_base:WorkerBase.add_lora": ("lora_request",),
    "vllm.v1.worker.worker_base:WorkerBase.remove_lora": ("lora_id",),
    "vllm.v1.executor:Executor.collective_rpc": ("method", "args"),
    "vllm.v1.executor:Executor.remove_lora": ("lora_id",),
    "vllm.v1.engine.core:EngineCore.abort_requests": ("request_ids",),
    "vllm.v1.engine.core:EngineCore.step": (),
    "vllm.v1.engine.core:EngineCore.step_with_batch_queue": (),
    "vllm.v1.engine.core:EngineCore.post_step": ("model_executed",),
    "vllm.v1.engine.core:EngineCore.reset_prefix_cache": (),
    "vllm.v1.engine.core:EngineCore.execute_dummy_batch": (),
    "vllm.v1.executor:Executor.get_class": ("vllm_config",),
    "vllm.v1.executor:Executor.shutdown": (),
    "vllm.v1.executor:Executor.sleep": ("level",),
    "vllm.v1.executor:Executor.wake_up": ("tags",),
    "vllm.v1.core.sched.scheduler:Scheduler.shutdown": (),
    "vllm.v1.core.sched.scheduler:Scheduler.has_requests": (),
    "vllm.v1.core.sched.scheduler:Scheduler.has_unfinished_requests": (),
    "vllm.v1.structured_output.backend_guidance:GuidanceBackend": ("vllm_config", "tokenizer", "vocab_size"),
    "vllm.v1.structured_output.backend_guidance:GuidanceBackend.compile_grammar": (
        "request_type",
        "grammar_spec",
        "stop_token_ids",
    ),
    "vllm.v1.structured_output.backend_guidance:GuidanceGrammar": (
        "ll_matcher",
        "ll_tokenizer",
        "vocab_size",
    ),
    "vllm.v1.structured_output.backend_guidance:GuidanceGrammar.accept_tokens": ("request_id", "tokens"),
    "vllm.config:ModelConfig.get_vocab_size": (),
    "vllm.config:ModelConfig.try_get_generation_config": (),
}
"""What is called, and the parameters that are given."""

FIELDS: dict[str, tuple[str, ...]] = {
    "vllm.v1.engine:EngineCoreRequest": (
        "request_id",
        "prompt_token_ids",
        "mm_features",
        "sampling_params",
        "pooling_params",
        "arrival_time",
        "lora_request",
        "cache_salt",
        "data_parallel_rank",
        "priority",
    ),
    "vllm.v1.engine:EngineCoreOutputs": ("outputs", "scheduler_stats"),
    "vllm.v1.engine:EngineCoreOutput": (
        "request_id",
        "new_token_ids",
        "new_logprobs",
        "new_prompt_logprobs_tensors",
        "finish_reason",
        "stop_reason",
        "events",
        "prefill_stats",
        "kv_transfer_params",
    ),
    "vllm.v1.engine:EngineCoreEvent": ("type",),
    "vllm.sampling_params:SamplingParams": (
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop_token_ids",
        "ignore_eos",
        "max_tokens",
        "min_tokens",
        "logprobs",
        "prompt_logprobs",
        "detokenize",
        "logit_bias",
        "allowed_token_ids",
        "structured_outputs",
        "extra_args",
        "_bad_words_token_ids",
    ),
    "vllm.v1.metrics.stats:SchedulerStats": (
        "kv_cache_usage",
        "prefix_cache_stats",
        "connector_prefix_cache_stats",
        "spec_decoding_stats",
    ),
    "vllm.v1.metrics.stats:PrefixCacheStats": ("queries", "hits"),
    "vllm.v1.metrics.stats:PrefillStats": ("num_cached_tokens", "num_external_cached_tokens"),
    "vllm.v1.spec_decode.metrics:SpecDecodingStats": (
        "num_drafts",
        "num_draft_tokens",
        "num_accepted_tokens",
        "num_accepted_tokens_per_pos",
    ),
    "vllm.v1.structured_output.request:StructuredOutputRequest": ("_grammar",),
    "vllm.sampling_params:StructuredOutputsParams": ("grammar", "_backend"),
    "vllm.config:VllmConfig": (
        "model_config",
        "cache_config",
        "scheduler_config",
        "parallel_config",
        "speculative_config",
        "structured_outputs_config",
        "lora_config",
        "kv_transfer_config",
    ),
    "vllm.config:ModelConfig": ("max_model_len", "dtype", "skip_tokenizer_init", "enable_sleep_mode"),
    "vllm.config:CacheConfig": CACHE_CONFIG_LABELS,
    "vllm.config:SchedulerConfig": ("max_num_seqs",),
    "vllm.config:ParallelConfig": ("data_parallel_rank_local", "data_parallel_index"),
    "vllm.engine.arg_utils:EngineArgs": ("data_parallel_size", "data_parallel_rank"),
    "vllm.config.lora:LoRAConfig": ("max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype"),
    "vllm.lora.request:LoRARequest": ("lora_name", "lora_int_id", "lora_path"),
}
"""Fields that are set or read."""

FIRST: dict[str, tuple[str, ...]] = {
    "vllm.v1.outputs:LogprobsLists": ("logprob_token_ids", "logprobs", "sampled_token_ranks"),
    "vllm.v1.outputs:LogprobsTensors": ("logprob_token_ids", "logprobs", "selected_token_ranks"),
}
"""Tuples that are unpacked: their first fields."""

FLAGS = (
    *("--model", "--max-num-seqs", "--tokenizer", "--dtype", "--load-format", "--seed", "--max-logprobs"),
    *("--max-model-len", "--max-num-batched-tokens", "--scheduling-policy", "--block-size"),
    *("--enable-prefix-caching", "--no-enable-prefix-caching", "--gpu-memory-utilization"),
    *("--kv-cache-memory-bytes", "--async-scheduling", "--no-async-scheduling"),
    *("--enable-lora", "--no-enable-lora", "--max-loras", "--max-lora-rank", "--max-cpu-loras"),
)


def find(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = import_module(module)
    for part in path.split("."):
        found = inspect.getattr_static(found, part) if inspect.isclass(found) else getattr(found, part)
    return found.__func__ if isinstance(found, staticmethod | classmethod) else found


@pytest.mark.parametrize("name", CALLS)
def test_what_is_called_takes_what_is_given(name: str) -> None:
    parameters = inspect.signature(find(name)).parameters
    missing = [given for given in CALLS[name] if given not in parameters]
    assert not missing
    needed = [
        each.name
        for each in parameters.values()
        if each.default is each.empty
        and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        and each.name not in ("self", "cls", *CALLS[name])
    ]
    assert not needed


def fields_of(found: Any) -> set[str]:
    if dataclasses.is_dataclass(found):
        return {field.name for field in dataclasses.fields(found)}
    return {field.name for field in msgspec.structs.fields(found)}


@pytest.mark.parametrize("name", FIELDS)
def test_fields_that_are_used_exist(name: str) -> None:
    assert not set(FIELDS[name]) - fields_of(find(name))


@pytest.mark.parametrize("name", FIRST)
def test_tuples_begin_as_they_are_unpacked(name: str) -> None:
    assert find(name)._fields[:3] == FIRST[name]


def test_outputs_that_are_read_are_absent_by_default() -> None:
    """Most outputs have none of these, so :meth:`Core.step` looks for what is not None."""
    output = find("vllm.v1.engine:EngineCoreOutput")("name", [1])
    assert (output.finish_reason, output.events, output.new_logprobs) == (None, None, None)


def test_members_that_are_compared() -> None:
    reasons, events = find("vllm.v1.engine:FinishReason"), find("vllm.v1.engine:EngineCoreEventType")
    assert {member.name for member in reasons} >= {"STOP", "LENGTH", "ABORT", "ERROR"}
    assert "PREEMPTED" in {member.name for member in events}


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_that_options_become(flag: str) -> None:
    parser = internals.EngineArgs.add_cli_args(internals.VllmArgumentParser(add_help=False))
    assert flag in parser._option_string_actions


def test_attributes_of_a_core() -> None:
    """Instances have them, so they are looked for where they are assigned."""
    source = inspect.getsource(import_module("vllm.v1.engine.core").EngineCore)
    for name in ("scheduler", "batch_queue", "step_fn", "model_executor", "structured_output_manager"):
        assert f"self.{name}" in source, name
    manager = inspect.getsource(import_module("vllm.v1.structured_output").StructuredOutputManager)
    for name in ("backend", "tokenizer", "executor"):
        assert f"self.{name}" in manager, name


def test_variables_that_are_set() -> None:
    known = set(import_module("vllm.envs").environment_variables)
    assert known >= {*process_group.VARIABLES, "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CONFIGURE_LOGGING"}


def test_what_keeps_versions_of_an_adapter_apart() -> None:
    """vLLM hashes blocks by name and path of an adapter, and events have the name; loaded ones are found by
    number, so that a step reads no files."""
    made = internals.AdapterRequest(lora_name="sql", lora_int_id=3, lora_path="/copy")
    request = SimpleNamespace(lora_request=made)
    keys = find("vllm.v1.core.kv_cache_utils:_gen_lora_extra_hash_keys")(request)
    assert keys == [("lora", "sql", "/copy")]
    assert find("vllm.v1.core.kv_cache_utils:to_event_extra_keys")([tuple(keys)]) == [("sql",)]
    assert (made.name, made.adapter_id) == ("sql", 3)
    manager = inspect.getsource(find("vllm.lora.worker_manager:LRUCacheWorkerLoRAManager.add_adapter"))
    assert "lora_request.lora_int_id not in self.list_adapters()" in manager
    worker = find("vllm.v1.worker.gpu_worker:Worker.reload_weights")
    assert "reload_weights" in inspect.getsource(worker)
