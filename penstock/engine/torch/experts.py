"""How a layer with experts computes them, without the host reading how many tokens each has.

PyTorch's grouped product does so on a GPU where it has no kernel: a copy to the host in each layer, for which
the host waits, and which no CUDA graph can record.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

GROUPED = "grouped_mm"
ALL_EXPERTS = "penstock_all_experts"
"""Name under which :func:`_all_experts` is registered as transformers' experts implementation."""
GROUPED_KERNELS = 9, 10
"""Major compute capabilities whose GPUs have kernels for grouped products, of bfloat16 alone (PyTorch 2.11,
aten/src/ATen/native/cuda/GroupedBlas.cpp)."""
FEW_TOKENS = 256
"""Tokens that all experts compute; more have their own experts only, and the host waits. In half precision a
GPU takes as long to read a weight as to multiply it with some 150 (A100) to 300 (H100) tokens."""


def pick_experts(dtype: torch.dtype, device: torch.device) -> str:
    """The name of the experts implementation for weights of ``dtype`` on ``device``."""
    if device.type != "cuda":
        return GROUPED
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in GROUPED_KERNELS:
        return GROUPED
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(ALL_EXPERTS, _all_experts)
    return ALL_EXPERTS


def most_recorded(model: Any) -> int:
    """Tokens of the largest step of a transformers model that can be recorded as a CUDA graph."""
    return FEW_TOKENS if model.config._experts_implementation == ALL_EXPERTS else sys.maxsize


def _all_experts(experts: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """hidden [T, H], with the index int64[T, K] and the weights [T, K] of each token's K experts → [T, H]"""
    from transformers.integrations.moe import ExpertsInterface

    if len(hidden) > FEW_TOKENS:
        grouped: Tensor = ExpertsInterface()[GROUPED](experts, hidden, index, weights)
        return grouped
    every = hidden.expand(experts.num_experts, -1, -1)
    inner = experts._apply_gate(torch.bmm(every, experts.gate_up_proj.transpose(1, 2)))
    outputs = torch.bmm(inner, experts.down_proj.transpose(1, 2)).transpose(0, 1)  # [T, experts, H]
    # only a token's own: of others even an overflow means nothing
    own = outputs.gather(1, index[:, :, None].expand(-1, -1, outputs.shape[-1]))
    return (own * weights[:, :, None]).sum(1).to(hidden.dtype)
