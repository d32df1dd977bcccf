"""Loads the model of a directory that makes vectors, scores or labels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from penstock.config.serve import ServeConfig
from penstock.engine.pooling.description import PoolingDescription
from penstock.engine.pooling.modules import Modules, read_modules
from penstock.engine.torch.device import place_rank, step_threads
from penstock.engine.torch.model_loader import Head as HeadKind
from penstock.engine.torch.model_loader import load_model, pick_dtype, read_config
from penstock.engine.torch.out_of_memory import stating_shortage
from penstock.engine.torch.pooling.decoders import load_decoder, runs_causally
from penstock.engine.torch.pooling.encoder_states import EncoderStates
from penstock.engine.torch.pooling.heads import Head, LabelHead, VectorHead
from penstock.engine.torch.pooling.packed_attention import PackedAttention
from penstock.engine.torch.pooling.torch_pooling_model import States, TorchPoolingModel
from penstock.metrics.freed_memory import keep_freed_memory
from penstock.wire.pooling import PoolingInfo, PoolingTask

ATTENTION = "penstock_packed"
CPU_TOKENS = 1 << 12
"""Tokens that a CPU computes at once. Smaller parts take more time (docs/log.md), larger ones more memory."""
DEVICE_TOKENS = 1 << 16
LESS = "take --dtype bfloat16, a smaller model, or a device with more free memory"


def load_pooling_model(
    config: ServeConfig,
    model_dir: str,
    description: PoolingDescription,
    progress: Callable[[str, float | None], None],
    rank: int = 0,
) -> TorchPoolingModel:
    """The model in ``model_dir``. ``rank`` chooses the device. Raises ConfigError for what a restart would
    not cure."""
    progress("loading PyTorch", None)
    keep_freed_memory()
    place = place_rank(config, rank)
    device = place.device
    # API servers do little beside vectors: on two cores, two threads answer 1.5 times as many requests
    torch.set_num_threads(step_threads(config, device, spared=0))
    modules = read_modules(Path(model_dir))
    directory = str(modules.transformer)
    transformer = read_config(directory)
    dtype = pick_dtype(config, transformer.dtype, device)
    progress("loading weights", 0.2)
    kind = head_kind(description)
    load = load_decoder if runs_causally(transformer) else _load_encoder
    with stating_shortage(f"loading the weights of {model_dir}", LESS, device):
        states, head = load(config, modules, kind, dtype=dtype, device=device)
    info = PoolingInfo(
        tasks=tuple(int(task) for task in description.tasks),
        width=description.width,
        labels=len(description.labels),
        generates=description.generates,
    )
    tokens = CPU_TOKENS if device.type == "cpu" else DEVICE_TOKENS
    return TorchPoolingModel(info, states, head, tokens=tokens, device=device, dtype=dtype)


def _load_encoder(
    config: ServeConfig, modules: Modules, kind: HeadKind, *, dtype: torch.dtype, device: torch.device
) -> tuple[States, Head]:
    attend, directory = PackedAttention(), str(modules.transformer)
    model = load_backbone(config, directory, kind, dtype=dtype, device=device, attend=attend)
    if kind == "none":
        return EncoderStates(model, attend), VectorHead(modules, device)
    base = model.base_model
    head = LabelHead(model, modules.label_activation)
    return EncoderStates(base, attend), head


def head_kind(description: PoolingDescription) -> HeadKind:
    """What the model has behind its layers."""
    if PoolingTask.CLASSIFY in description.tasks:
        return "labels"
    return "token_labels" if PoolingTask.TOKEN_CLASSIFY in description.tasks else "none"


def load_backbone(
    config: ServeConfig,
    directory: str,
    kind: HeadKind,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attend: PackedAttention,
) -> Any:
    """transformers' model of an encoder, which attends by ``attend``."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)
    return load_model(directory, config, dtype=dtype, device=device, attention=ATTENTION, head=kind)
