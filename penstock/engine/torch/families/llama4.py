"""Llama 4: attention in chunks, queries scaled by their positions, experts that compute their own tokens.

transformers tells an attention function of chunks by a mask alone, counts positions from the start of a batch
on, and lets every expert compute all tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.engine.torch.experts import pick_experts


def adapt(model: Any) -> None:
    """Change a Llama 4 model that is loaded, on its device."""
    config = model.config
    model.base_model_prefix = "model"  # that of the class is the name of another part
    config._experts_implementation = pick_experts(model.dtype, model.device)
    for layer in model.base_model.layers:
        attention = layer.self_attn
        if config.layer_types[attention.layer_idx] == "chunked_attention":
            layer.forward = partial(layer.forward, chunk=config.attention_chunk_size)
        if attention.attn_temperature_tuning and not attention.use_rope:
            attention.attn_temperature_tuning = False
            layer.forward = partial(_scaling_queries, layer.forward, config)
        if layer.is_moe_layer:
            _route_tokens(layer.feed_forward, config)


def _scaling_queries(
    forward: Any, config: Any, hidden: Tensor, position_ids: Tensor, **options: Any
) -> Tensor:
    """The forward pass of a layer whose attention function gets a factor [1, T] of each token's query."""
    scales = torch.log1p(torch.floor((position_ids.float() + 1.0) / config.floor_scale))
    scaled: Tensor = forward(
        hidden, position_ids=position_ids, query_scale=scales * config.attn_scale + 1.0, **options
    )
    return scaled


def _route_tokens(layer: Any, config: Any) -> None:
    """Let the layer's experts compute by an experts implementation of transformers."""
    from transformers.integrations.moe import ExpertsInterface

    experts = layer.experts
    experts.has_gate, experts.is_transposed, experts.is_concatenated = True, True, True
    experts.has_bias = experts.has_post_expert_norm = experts._is_expert_parallel = False
    experts._apply_gate = partial(_gated, experts)
    compute = ExpertsInterface()[config._experts_implementation]
    experts.forward = partial(_compute_experts, experts, compute)
    layer.forward = partial(_compute_layer, layer)


def _gated(experts: Any, both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    gated: Tensor = up * experts.act_fn(gate)
    return gated


def _compute_layer(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """[T, H] of hidden [1, T, H], and the router's logits."""
    flat = hidden.reshape(-1, layer.hidden_dim)
    _, logits = layer.router(flat)
    values, index = logits.topk(layer.top_k, -1)
    weights = values.float().sigmoid().to(flat.dtype)
    return layer.shared_expert(flat) + layer.experts(flat, index, weights), logits


def _compute_experts(experts: Any, compute: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """hidden [T, H], with the index int64[T, K] and the weights [T, K] of each token's experts → [T, H].
    Weights are factors of what an expert gets, not of what it gives."""
    ones = torch.ones_like(weights[:, :1])
    columns = zip(torch.split(index, 1, 1), torch.split(weights, 1, 1), strict=True)
    total: Tensor = sum(compute(experts, hidden * weight, chosen, ones) for chosen, weight in columns)
    return total
