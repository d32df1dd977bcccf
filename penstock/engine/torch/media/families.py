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
    """Whether the features of a picture have positions in time, height and width (M-RoPE)."""


SEEING_FAMILIES: dict[str, SeeingFamily] = {
    "idefics3": SeeingFamily(dimensions=5),
    "llava": SeeingFamily(),
    "smolvlm": SeeingFamily(dimensions=5),
}
"""By model_type of config.json. Tests compare their greedy output with transformers' own."""


def seeing_family(model_dir: Path, config: ServeConfig) -> SeeingFamily | None:
    """Of a model that is to take pictures; None: it is to take text alone. The directory has been checked."""
    if config.language_model_only or config.enable_expert_parallel or config.runner == "pooling":
        return None
    described: Any = json.loads((model_dir / "config.json").read_bytes())
    return SEEING_FAMILIES.get(described["model_type"])
