"""Rids a transformers model of forward passes in which the host reads a tensor.

The host would wait for the device in each of them, and none could be recorded as a CUDA graph.
"""

from __future__ import annotations

import inspect
from functools import partial
from types import SimpleNamespace
from typing import Any

from penstock.engine.model_length import ROPE_BY_LENGTH


def remove_host_reads(model: Any) -> None:
    """Change a causal LM that is loaded and gets no positions beyond its original training length."""
    model.config.pad_token_id = None  # GPT-2 looks for it in each batch, to warn of padding
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if type(module).__name__ == "PhimoeRotaryEmbedding":
            _keep_phimoe_frequencies(module)
        elif ROPE_BY_LENGTH.intersection(kinds.values() if isinstance(kinds, dict) else [kinds]):
            # without transformers' decorator, which reads the longest position
            module.forward = partial(inspect.unwrap(type(module).forward), module)


def _keep_phimoe_frequencies(rotary: Any) -> None:
    """Phi 3.5 MoE computes its frequencies on the host in each forward pass, and its scale by the longest
    position."""
    scale = rotary.attention_scaling
    parameters = rotary.config.rope_parameters
    if parameters["rope_type"] != "default":
        scale = parameters["short_mscale"]
    rotary.config = SimpleNamespace(rope_parameters={"rope_type": "default"})
    rotary.rope_init_fn = lambda *unused: (rotary.inv_freq, scale)
    rotary.forward = partial(inspect.unwrap(type(rotary).forward), rotary)
