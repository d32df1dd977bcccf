"""How long a text a model takes, by its config.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.config.errors import ConfigError, NeedsVllm

DEFAULT_MAX_MODEL_LEN = 8192
"""Used when config.json is missing or states no length."""
LENGTH_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_seq_length",
    "max_sequence_length",
    "max_context_length",
    "context_length",
    "seq_length",
    "seq_len",
    "max_target_positions",
    "max_decoder_position_embeddings",
    "max_text_positions",
    "model_max_length",
)
"""Fields of config.json that state how long a text may be; the first one that is there counts."""
ROPE_BY_LENGTH = frozenset({"dynamic", "longrope"})
"""Rotary embeddings that change with the longest position of a batch once it exceeds the original training
length. A stream's tokens must not depend on other streams, so such models are served up to that length."""


def length_field(described: Mapping[str, Any]) -> str | None:
    """Which field of a config.json states how long a text may be; None: none does. Command R has two: its
    ``max_position_embeddings`` is smaller than what it was trained for."""
    names = LENGTH_NAMES
    if str(described.get("model_type")).startswith("cohere"):
        names = names[::-1]
    return next((name for name in names if name in described), None)


def longest_text(described: Mapping[str, Any]) -> int | None:
    """The maximum length that a config.json states, as it is or as transformers gives it; None: it states
    none. A rotary embedding that is stretched for every text adds to it, one that changes with the length
    takes away."""
    field = length_field(described)
    stated = described[field] if field is not None else None
    if type(stated) is not int or stated < 1:
        return None
    longest = stated
    ropes = described.get("rope_parameters") or described.get("rope_scaling") or {}
    for rope in (ropes, *ropes.values()) if isinstance(ropes, dict) else ():
        if not isinstance(rope, dict):
            continue
        kind = rope.get("rope_type") or rope.get("type")
        original = _number(rope, "original_max_position_embeddings") or _number(
            described, "original_max_position_embeddings"
        )
        if kind in ROPE_BY_LENGTH and not rope.get("alpha"):  # by alpha Hunyuan's is fixed
            longest = min(longest, int(original or longest))
        elif kind == "yarn":  # models state the length before or after it is stretched
            longest = max(longest, int((original or stated) * (_number(rope, "factor") or 1)))
    return longest


def check_max_model_len(model_dir: Path, asked: int) -> None:
    """Raises ConfigError if the model takes fewer than ``asked`` tokens; NeedsVllm, with the stretched rotary
    embedding that it takes more with, if it has a plain one."""
    described = json.loads((model_dir / "config.json").read_bytes())
    part = described.get("text_config")
    nested = isinstance(part, dict)
    described = part if nested else described
    longest = longest_text(described)
    if longest is None or asked <= longest:
        return
    text = f"--max-model-len {asked}: the model takes at most {longest} tokens (config.json)"
    rope = described.get("rope_parameters") or {}
    theta = rope.get("rope_theta") or described.get("rope_theta")
    plain = not described.get("rope_scaling") and rope.get("rope_type", "default") == "default"
    if theta is None or not plain:
        raise ConfigError(text)
    factor = math.ceil(100 * asked / longest) / 100
    stretched = {**rope, "rope_theta": theta, "rope_type": "yarn", "factor": factor}
    stretched["original_max_position_embeddings"] = longest
    overrides: dict[str, Any] = {"rope_parameters": stretched}
    overrides = {"text_config": overrides} if nested else overrides
    raise NeedsVllm(
        f"{text}; vLLM stretches its rotary embedding with --hf-overrides, for models that were made for it",
        ("--hf-overrides", json.dumps(overrides)),
    )


def _number(described: Mapping[str, Any], name: str) -> float:
    value = described.get(name)
    return value if isinstance(value, (int, float)) else 0
