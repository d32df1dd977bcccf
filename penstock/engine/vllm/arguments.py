"""Translates Penstock's options to arguments of vLLM's command line."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.adapters.lora_modules import lora_settings
from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig

SAME_NAME = (
    "tokenizer",
    "dtype",
    "load_format",
    "seed",
    "max_logprobs",
    "max_model_len",
    "max_num_batched_tokens",
    "scheduling_policy",
    "block_size",
    "enable_prefix_caching",
    "enforce_eager",
    "gpu_memory_utilization",
)
"""Options with the same name and meaning in vLLM; passed on when they are set."""
OTHER_NAME = {"kv_cache_memory": "kv-cache-memory-bytes"}
REFUSED = {
    "device": "vLLM runs on the device that it was built for",
    "threads": "set VLLM_CPU_OMP_THREADS_BIND or OMP_NUM_THREADS, as for vLLM",
    "batch_invariant": "set VLLM_BATCH_INVARIANT=1, as for vLLM",
    "max_prefill_delay": "vLLM's scheduler decides how prompts and decodes share a step",
    "synthetic_step_ms": "it is the synthetic engine's",
    "synthetic_tokens_per_step": "it is the synthetic engine's",
    "synthetic_acceptance_rate": "it is the synthetic engine's",
    "synthetic_prefill_tokens_per_s": "it is the synthetic engine's",
    "synthetic_fault": "it is the synthetic engine's",
}
"""Options of the other engines that are refused with this one, and why."""


def arguments(config: ServeConfig, model_dir: str, given: Sequence[str]) -> list[str]:
    """vLLM's arguments for ``config``, of which the operator has set the fields ``given``.

    Options that were not set are left to vLLM, except --max-num-seqs, the number of slots, and the limits of
    adapters, which the supervisor checks. The operator's own arguments for vLLM come last, so they take
    precedence; adapters are loaded later. Raises ConfigError for a refused option.
    """
    result = ["--model", model_dir, "--max-num-seqs", str(config.max_num_seqs)]
    return [*result, *engine_options(config, given)]


def engine_options(config: ServeConfig, given: Sequence[str], adapter_room: int = 1) -> list[str]:
    """vLLM's arguments for the options ``given``, and the limits of adapters; ``adapter_room``: by how much
    vLLM's number of loaded ones exceeds Penstock's. Raises ConfigError for a refused option."""
    values = vars(config)
    result: list[str] = []
    for field in given:
        if field in REFUSED:
            flag = "--engine vllm" if config.attach is None else "--attach"
            raise ConfigError(f"--{_flag(field)} cannot be set with {flag}: {REFUSED[field]}")
        value = values[field]
        if field in SAME_NAME or field in OTHER_NAME:
            flag = OTHER_NAME.get(field, _flag(field))
            if isinstance(value, bool):
                result.append(f"--{flag}" if value else f"--no-{flag}")
            elif value is not None:
                result += [f"--{flag}", str(value)]
        elif field == "kv_events_config" and value is not None:
            result += ["--kv-events-config", msgspec.json.encode(_vllm_kv_events(config)).decode()]
        elif field == "async_scheduling" and value != "auto":
            result.append("--async-scheduling" if value == "on" else "--no-async-scheduling")
    if config.attach is not None and "max_num_seqs" in given:
        result += ["--max-num-seqs", str(config.max_num_seqs)]
    if config.enable_expert_parallel:
        result.append("--enable-expert-parallel")
    lora = lora_settings(config)
    if lora.enabled:
        result += ["--enable-lora", "--max-loras", str(lora.max_loras)]
        result += ["--max-lora-rank", str(lora.max_lora_rank)]
        result += ["--max-cpu-loras", str(adapter_room * lora.max_cpu_loras)]
    return [*result, *lora.engine_args]


def _vllm_kv_events(config: ServeConfig) -> dict[str, object]:
    """vLLM's KV cache events; the defaults are Penstock's."""
    fields = msgspec.structs.asdict(config.kv_events)
    return {name: value for name, value in fields.items() if value is not None}


def _flag(field: str) -> str:
    return field.replace("_", "-")
