"""Make ``vllm serve --headless`` commands: of engines that operators start, and of those that start here."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.adapters.lora_modules import lora_settings
from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig
from penstock.wire.vllm.addresses import EVERYWHERE, split_address

SAME_NAME = (
    "runner",
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
    "limit_mm_per_prompt",
    "mm_processor_kwargs",
    "language_model_only",
)
"""Options with the same name and meaning in vLLM; passed on when they are set."""
OTHER_NAME = {"kv_cache_memory": "kv-cache-memory-bytes"}
_SET = "the command has it already, by Penstock's own options before --"
_SERVED = "clients connect here; set it before --"
OWN = {
    "--model": "it is MODEL, before --",
    "--headless": _SET,
    "--data-parallel-size": _SET,
    "-dp": _SET,
    "--data-parallel-size-local": _SET,
    "-dpl": _SET,
    "--data-parallel-rank": _SET,
    "-dpn": _SET,
    "--data-parallel-start-rank": _SET,
    "-dpr": _SET,
    "--data-parallel-address": _SET,
    "-dpa": _SET,
    "--data-parallel-rpc-port": _SET,
    "-dpp": _SET,
    "--host": _SERVED,
    "--port": _SERVED,
    "--uds": _SERVED,
    "--api-key": _SERVED,
    "--api-server-count": _SERVED,
}
"""Arguments of vllm serve that are refused behind ``--``, and why."""
ADAPTER_ROOM = 2
"""vLLM's --max-cpu-loras is this many times Penstock's: vLLM must never drop an adapter that streams use,
also while another version of it is loaded."""


def attach_commands(config: ServeConfig, model: str, given: Sequence[str]) -> list[str]:
    """Return the commands of ``--attach``, one for each host, in the order of ranks. ``model``: as vLLM is to
    find it; ``given``: fields of ``config`` that the operator has set. Raises ConfigError."""
    assert config.attach is not None
    host, port = split_address(config.attach)
    if host in EVERYWHERE:
        host = socket.gethostname()
    local = config.data_parallel_size_local or config.data_parallel_size
    options = engine_options(config, given)
    if config.revision is not None:
        options = ["--revision", config.revision, *options]
    commands = []
    for first in range(0, config.data_parallel_size, local):
        ranks = ["--data-parallel-size", str(config.data_parallel_size)]
        ranks += ["--data-parallel-size-local", str(local), "--data-parallel-start-rank", str(first)]
        commands.append(shlex.join(["vllm", *_serve(model, ranks, (host, port)), *options]))
    return commands


def launch_arguments(
    config: ServeConfig, model_dir: str, given: Sequence[str], handshake: tuple[str, int]
) -> list[str]:
    """Return what follows ``vllm`` in the command of one engine that is started here. vLLM takes it for the
    only one: it learns its place among several at the ``handshake``, a host and port. Raises ConfigError."""
    options = engine_options(config, given)
    if config.profile_dir is not None and not _is_behind(config, "--profiler-config"):
        profiler = {"profiler": "torch", "torch_profiler_dir": str(Path(config.profile_dir).absolute())}
        options += ["--profiler-config", msgspec.json.encode(profiler).decode()]
    return [*_serve(model_dir, (), handshake), *options]


def engine_options(config: ServeConfig, given: Sequence[str]) -> list[str]:
    """Return vLLM's arguments for the options ``given``, the limits of adapters, and what stands behind
    ``--``, which takes precedence. What was not set is left to vLLM, but for the number of slots of an engine
    that is started here. Raises ConfigError for what may not stand behind ``--``."""
    values = vars(config)
    result: list[str] = []
    for field in given:
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
    if config.attach is None or "max_num_seqs" in given:
        result += ["--max-num-seqs", str(config.max_num_seqs)]
    lora = lora_settings(config)
    if lora.enabled:
        result += ["--enable-lora", "--max-loras", str(lora.max_loras)]
        result += ["--max-lora-rank", str(lora.max_lora_rank)]
        result += ["--max-cpu-loras", str(ADAPTER_ROOM * lora.max_cpu_loras)]
    _check_behind(config)
    return [*result, *lora.engine_args]


def _serve(model: str, ranks: Sequence[str], handshake: tuple[str, int]) -> list[str]:
    host, port = handshake
    address = ("--data-parallel-address", host, "--data-parallel-rpc-port", str(port))
    return ["serve", model, "--headless", *ranks, *address]


def _check_behind(config: ServeConfig) -> None:
    """Raise ConfigError for arguments behind ``--`` that are Penstock's to set, or of vLLM's API server."""
    way = "--attach" if config.attach is not None else "--engine vllm"
    for argument in config.engine_args or ():
        if (reason := OWN.get(_name(argument))) is not None:
            raise ConfigError(f"{argument} behind --: with {way} it is not the engine's: {reason}")


def _is_behind(config: ServeConfig, flag: str) -> bool:
    """Whether ``flag``, or one of its fields, stands behind ``--``."""
    return any(_name(argument).partition(".")[0] == flag for argument in config.engine_args or ())


def _name(argument: str) -> str:
    return argument.partition("=")[0].replace("_", "-")


def _vllm_kv_events(config: ServeConfig) -> dict[str, object]:
    """Return vLLM's KV cache events; the defaults are Penstock's."""
    fields = msgspec.structs.asdict(config.kv_events)
    return {name: value for name, value in fields.items() if value is not None}


def _flag(field: str) -> str:
    return field.replace("_", "-")
