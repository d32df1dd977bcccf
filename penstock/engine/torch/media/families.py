"""Models whose pictures the torch engine encodes. Imports no torch, for the supervisor to ask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from penstock.config.serve import ServeConfig


class SeeingFamily(NamedTuple):
    """What transformers' configuration of a model does not say."""

    dimensions: int = 4
    """Of ``pixel_values`` as its encoder takes them: pictures or patches first."""
    whole_spans: bool = False
    """Whether the tokens of a picture attend to those behind them in it, so that one step computes them."""
    grid_positions: bool = False
    """Whether the features of a picture have positions in time, height and width (M-RoPE). transformers has
    no causal LM of such a text part alone."""


SEEING_FAMILIES: dict[str, SeeingFamily] = {
    "gemma3": SeeingFamily(whole_spans=True),
    "idefics3": SeeingFamily(dimensions=5),
    "llava": SeeingFamily(),
    "llava_next": SeeingFamily(dimensions=5),
    "qwen2_5_vl": SeeingFamily(dimensions=2, grid_positions=True),
    "qwen2_vl": SeeingFamily(dimensions=2, grid_positions=True),
    "smolvlm": SeeingFamily(dimensions=5),
}
"""By model_type of config.json. Tests compare their greedy output with transformers' own."""


def seeing_family(model_dir: Path, config: ServeConfig) -> SeeingFamily | None:
    """Of a model that is to take pictures; None: it is to take text alone. The directory has been checked."""
    if config.language_model_only or config.enable_expert_parallel or config.runner == "pooling":
        return None
    return _family(model_dir)


def is_whole_only(model_dir: Path) -> bool:
    """Whether a model is loaded with all of its parts even if it is to take text alone."""
    family = _family(model_dir)
    return family is not None and family.grid_positions


def _family(model_dir: Path) -> SeeingFamily | None:
    described: Any = json.loads((model_dir / "config.json").read_bytes())
    return SEEING_FAMILIES.get(described["model_type"])
