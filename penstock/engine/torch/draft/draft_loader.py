"""Loads a draft model, and checks that it can draft for the model."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.config.errors import ConfigError
from penstock.config.options.adapters import AdapterOptions
from penstock.config.serve import ServeConfig
from penstock.engine.torch.model import PagedModel
from penstock.engine.torch.model_loader import ModelShape, read_shape

log = logging.getLogger(__name__)


def read_draft_shape(config: ServeConfig, draft_dir: str, model_dir: str, tokenizer_dir: str) -> ModelShape:
    """The shape of --draft-model. Raises ConfigError when its tokens are not those of the model."""
    shape = read_shape(draft_dir)
    own, others = Path(draft_dir) / "tokenizer.json", Path(tokenizer_dir) / "tokenizer.json"
    if own.is_file() and others.is_file() and _vocabulary(own) != _vocabulary(others):
        raise ConfigError(
            f"--draft-model {config.draft_model}: its tokenizer has other tokens than that of {model_dir}; "
            "a draft model needs the same vocabulary"
        )
    most = read_shape(model_dir).max_positions if config.max_model_len is None else config.max_model_len
    if shape.max_positions < most:
        log.warning(
            "--draft-model %s takes %d tokens, the model %d: longer histories get no drafts",
            config.draft_model,
            shape.max_positions,
            most,
        )
    return shape


def load_draft_model(
    config: ServeConfig, draft_dir: str, shape: ModelShape, dtype: torch.dtype, device: torch.device
) -> PagedModel:
    """The draft model, without adapters, in the data type of the model."""
    without_adapters = replace(config, **vars(AdapterOptions()))
    return PagedModel(draft_dir, without_adapters, shape, dtype=dtype, device=device)


def _vocabulary(path: Path) -> Any:
    """The model of a tokenizer's file; added tokens may differ."""
    return json.loads(path.read_bytes())["model"].get("vocab")
