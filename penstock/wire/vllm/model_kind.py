"""Whether vLLM's engines of a model step together: those of a mixture of experts do, with several ranks."""

from __future__ import annotations

import json
from pathlib import Path

NAMES = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
"""Fields of config.json that tell the number of experts, as in vLLM."""


def has_experts(model_dir: Path) -> bool:
    """Whether config.json, its text_config first, tells a number of experts."""
    try:
        config = json.loads((model_dir / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    if not isinstance(config, dict):
        return False
    text = config.get("text_config")
    parts = [text, config] if isinstance(text, dict) else [config]
    for part in parts:
        blocks = part.get("block_configs")
        listed = [block for block in blocks if isinstance(block, dict)] if isinstance(blocks, list) else []
        numbers = [each.get(name) for each in (part, *listed) for name in NAMES]
        if any(_is_many(number) for number in numbers):
            return True
    return False


def _is_many(number: object) -> bool:
    """A number of experts, which some models tell per layer."""
    values = number if isinstance(number, list) else [number]
    return any(isinstance(value, int) and value > 0 for value in values)
