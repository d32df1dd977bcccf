"""Paged attention for BLOOM, the only supported family that lacks transformers' attention interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

Attend = Callable[..., tuple[Tensor, None]]


class BloomPagedAttention(nn.Module):
    """Replaces transformers' BloomAttention, with its projections."""

    def __init__(self, original: Any, attend: Attend) -> None:
        super().__init__()
        self.layer_idx = original.layer_idx
        self.query_key_value = original.query_key_value
        self.dense = original.dense
        self._heads = original.num_heads
        self._attend = attend

    def forward(self, hidden_states: Tensor, residual: Tensor, **unused: Any) -> tuple[Tensor, None]:
        """hidden_states, residual [1, T, H]. The model's mask and biases are unused: the attention function
        has each token's position."""
        _, length, width = hidden_states.shape
        fused = self.query_key_value(hidden_states).view(1, length, self._heads, 3, -1)
        query, key, value = (part.transpose(1, 2) for part in fused.unbind(3))
        attended, _ = self._attend(self, query, key, value, None)
        projected: Tensor = self.dense(attended.reshape(1, length, width))
        return projected + residual, None


def replace_attention(model: Any, attend: Attend) -> None:
    """Replace the attention of every layer of a BLOOM model."""
    for block in model.base_model.h:
        block.self_attention = BloomPagedAttention(block.self_attention, attend)


def alibi_slopes(heads: int) -> list[float]:
    """ALiBi slope of each head: a score's bias per position (Press, Smith, Lewis: Train Short, Test Long).

    A geometric sequence for powers of two; other counts add every second slope of the next power.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    return slopes + [2.0 ** (-4.0 * (2 * head + 1) / power) for head in range(heads - power)]
