"""Values of vLLM and SGLang for options of the same name: those with another name here, and those that only
they have."""

from __future__ import annotations

import json
import re

_SGLANGS_TOOLS = {
    "apertus2509": "apertus",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v4",
    "deepseekv41": "deepseek_v41",
    "glm": "glm45",
    "gpt-oss": "openai",
    "hunyuan": "hy_v3",
    "interns1": "internlm",
    "llama3": "llama3_json",
    "minimax-m2": "minimax_m2",
    "minimax-m3": "minimax_m3",
    "nanbeige": "qwen3_coder",
    "nemotron_3": "qwen3_coder",
    "qwen": "hermes",
    "qwen25": "hermes",
}
_SGLANGS_REASONING = {
    "apertus2509": "apertus",
    "deepseek-r1": "deepseek_r1",
    "deepseek-v3": "deepseek_v3",
    "deepseek-v4": "deepseek_v4",
    "deepseek-v41": "deepseek_v41",
    "gigachat35": "think",
    "gpt-oss": "openai_gptoss",
    "hunyuan": "hy_v3",
    "minimax": "minimax_m2",
    "minimax-append-think": "minimax_m2",
    "minimax-m3": "minimax_m3",
    "nemotron_3": "nemotron_v3",
    "qwen3-thinking": "qwen3",
    **dict.fromkeys(("dots", "interns1", "nanbeige"), "think"),
}
VALUES: dict[tuple[str, str], str] = {
    ("--dtype", "half"): "float16",
    ("--dtype", "float"): "float32",
    ("--generation-config", "vllm"): "none",
    ("--async-scheduling", "true"): "on",
    ("--async-scheduling", "false"): "off",
    ("--log-level", "DEBUG"): "debug",
    ("--log-level", "NOTSET"): "debug",
    ("--log-level", "INFO"): "info",
    ("--log-level", "WARNING"): "warning",
    ("--log-level", "ERROR"): "error",
    ("--log-level", "CRITICAL"): "error",
    ("--log-level", "critical"): "error",
    ("--log-level", "trace"): "debug",
    **{("--tool-call-parser", name): ours for name, ours in _SGLANGS_TOOLS.items()},
    **{("--reasoning-parser", name): ours for name, ours in _SGLANGS_REASONING.items()},
}
"""Our values by flag and vLLM's or SGLang's value."""

JSON_LISTS = frozenset({"--allowed-origins", "--allowed-methods", "--allowed-headers"})
"""Options whose list vLLM takes as one JSON text."""

OF_THE_ENGINE = {
    "--load-format": (
        "hf|pt|npcache|tensorizer|runai_streamer|runai_streamer_sharded|sharded_state|fastsafetensors|instanttensor"
        "|ipc_cache|modelexpress|bitsandbytes|gguf|mistral"
    ),
    "--max-model-len": "auto|-1",
    "--block-size": "[0-9]+",
}
"""Patterns of values that vLLM's engine has and Penstock's engines have not, by flag."""

_FORMAT = "the format follows from the chat template, or is one that {} takes"
OF_THE_SERVER = {
    "--generation-config": (".+", "put its generation_config.json beside the model"),
    "--tool-call-parser": (
        "beam|gigachat35|hf|hy_v4|inkling|iquest_q1|k2_horizon|minimax|minimax_m1|muse|musespark1x|response_template|spark25"
        "|trinity|xlam",
        _FORMAT.format("--tool-call-parser"),
    ),
    "--reasoning-parser": (
        "beam|hf|hy_v4|inkling|iquest_q1|k2_horizon|kimi|minimax_m2_append_think|muse|muse_glimmer|musespark1x"
        "|response_template",
        _FORMAT.format("--reasoning-parser"),
    ),
}
"""Patterns of values that only vLLM's server has, and what to do instead, by flag."""


def is_vllms(flag: str, value: str) -> bool:
    """Whether a value that Penstock's option of the same name does not take is one of vLLM's."""
    pattern = OF_THE_ENGINE.get(flag) or OF_THE_SERVER.get(flag, ("",))[0]
    return bool(pattern) and re.fullmatch(pattern, value) is not None


def translated(flag: str, given: str | list[str] | None) -> str | list[str] | None:
    """vLLM's value of an option in Penstock's words; None for a value that both write alike."""
    if isinstance(given, list):
        if flag in JSON_LISTS and len(given) == 1 and given[0].startswith("["):
            return _list(given[0])
        return None
    if flag in JSON_LISTS and given is not None and given.startswith("["):
        return _list(given)
    return None if given is None else VALUES.get((flag, given))


def _list(text: str) -> list[str] | None:
    try:
        values = json.loads(text)
    except ValueError:
        return None
    return values if isinstance(values, list) and all(isinstance(each, str) for each in values) else None
