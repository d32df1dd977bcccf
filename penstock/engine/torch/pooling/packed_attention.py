"""Attention of an encoder: every token attends to all tokens of its input, or to those near by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from penstock.engine.torch.pooling.packed_inputs import PackedInputs


class PackedAttention:
    """The attention function that transformers' layers call with packed inputs."""

    def __init__(self) -> None:
        self.inputs: PackedInputs | None = None
        """Set before each forward pass."""
        self.bias: Tensor | None = None
        """[1, H, L, L]: added to the scores of an input with L tokens at most, if the model has it."""

    def __call__(
        self,
        module: nn.Module | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **ignored: Any,
    ) -> tuple[Tensor, None]:
        """query [1, H, T, D]; key and value [1, KV heads, T, D]. Returns [1, T, H, D]."""
        assert self.inputs is not None
        rows = tuple(each[0].transpose(0, 1) for each in (query, key, value))
        found = []
        for tokens, inputs, length in self.inputs.equal:
            # [T, H, D] → [inputs, H, length, D], without a copy
            query, key, value = (
                each[tokens].view(inputs, length, *each.shape[1:]).transpose(1, 2) for each in rows
            )
            mask = _near(length, sliding_window, query.device)
            if self.bias is not None:
                mask = self.bias[:, :, :length, :length]
            shared = query.shape[1] != key.shape[1]
            attended = scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=scaling, enable_gqa=shared
            )
            found.append(attended.transpose(1, 2).flatten(0, 1))
        return (found[0] if len(found) == 1 else torch.cat(found))[None], None


def _near(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """bool[L, L]: which tokens are less than ``window`` apart; None: all are."""
    if window is None or length <= window:
        return None
    places = torch.arange(length, device=device)
    return (places[:, None] - places).abs() < window
