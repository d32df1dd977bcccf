"""How a layer with experts computes them, without the host reading how many tokens each has; and which
experts it computes, recorded in those forward passes that are asked to.

PyTorch's grouped product does so on a GPU where it has no kernel: a copy to the host in each layer, for which
the host waits, and which no CUDA graph can record.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.batch.routed_experts import ExpertRoutes, RoutedExpertsBuffer
from penstock.engine.torch.transfer import to_host

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
    inner = experts._apply_gate(_project(experts, "gate_up_proj", every))
    outputs = _project(experts, "down_proj", inner).transpose(0, 1)  # [T, experts, H]
    # only a token's own: of others even an overflow means nothing
    own = outputs.gather(1, index[:, :, None].expand(-1, -1, outputs.shape[-1]))
    return (own * weights[:, :, None]).sum(1).to(hidden.dtype)


def _project(experts: Any, name: str, rows: Tensor) -> Tensor:
    """[experts, T, in] → [experts, T, out]"""
    weights: Tensor = getattr(experts, name)
    product = torch.bmm(rows, weights if experts.is_transposed else weights.transpose(1, 2))
    if experts.has_bias:
        product += getattr(experts, f"{name}_bias")[:, None]
    return product


class RouteRecorder:
    """The layers with experts of one transformers model."""

    def __init__(self, model: Any) -> None:
        self._layers = [module for path, module in model.named_modules() if path.endswith(".experts")]
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        self._experts: int = next((found for name in names if (found := getattr(model.config, name, 0))), 0)
        per_token = getattr(model.config, "num_experts_per_tok", 0) or getattr(
            model.config, "top_k_experts", 0
        )
        if isinstance(per_token, list):  # of each layer (Hunyuan)
            per_token = max(per_token)
        self._per_token: int = per_token or 0

    @property
    def routes(self) -> ExpertRoutes | None:
        """What is recorded of a token; None: the model has no experts."""
        if not self._layers:
            return None
        return ExpertRoutes(layers=len(self._layers), per_token=self._per_token, experts=self._experts)

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Give a list to which a forward pass within the block appends int64[T, K] for each layer with
        experts. CUDA graphs record nothing."""
        found: list[Tensor] = []

        def note(experts: Any, arguments: tuple[Any, ...]) -> None:
            found.append(arguments[1])  # transformers calls them with hidden states, indexes and weights

        hooks = [layer.register_forward_pre_hook(note) for layer in self._layers]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()


@dataclass(slots=True, frozen=True)
class PendingRoutes:
    """Experts of a launched batch's T tokens."""

    slots: NDArray[np.intp]
    generations: NDArray[np.int64]
    positions: NDArray[np.int64]
    experts: Tensor
    """int16[T, layers, K], on the host once the batch is done."""

    @classmethod
    def of(
        cls,
        slots: NDArray[np.intp],
        generations: NDArray[np.int64],
        positions: NDArray[np.int64],
        recorded: list[Tensor],
    ) -> PendingRoutes:
        experts = torch.stack(recorded, 1)[: len(slots)].to(torch.int16)
        return cls(slots, generations, positions, to_host(experts))

    def write_to(self, buffer: RoutedExpertsBuffer) -> None:
        experts = self.experts.numpy().view(np.uint16)
        buffer.write(self.slots, self.generations, self.positions, experts)
