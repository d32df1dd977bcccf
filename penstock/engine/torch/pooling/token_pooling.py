"""Vectors of inputs from the states of their tokens, as sentence-transformers pools them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.engine.pooling.modules import PoolingMode
from penstock.engine.torch.pooling.packed_inputs import PackedInputs
from penstock.wire.arrays import I32


def pool(states: Tensor, inputs: PackedInputs, skipped: I32, modes: Sequence[PoolingMode]) -> Tensor:
    """float32[B, modes * H] of states [T, H]. ``skipped``: int32[B], tokens at the start of each input that
    do not count, fewer than it has."""
    rows, first = [], 0
    for tokens, count, length in inputs.equal:
        part = states[tokens].view(count, length, -1).float()
        left_out = skipped[first : first + count].astype(np.int64)
        start = inputs.on_device(left_out)[:, None] if left_out.any() else None
        rows.append(torch.cat([_pool(part, start, mode) for mode in modes], -1))
        first += count
    return torch.cat(rows)


def _pool(states: Tensor, start: Tensor | None, mode: PoolingMode) -> Tensor:
    """[n, L, H] → [n, H]. ``start`` int64[n, 1]: each input's first token that counts; None: all do."""
    if mode == "lasttoken":
        return states[:, -1]
    if mode == "cls":
        if start is None:
            return states[:, 0]
        return states.take_along_dim(start[:, :, None], 1)[:, 0]
    places = torch.arange(states.shape[1], device=states.device)
    if mode == "max":
        if start is not None:
            states = states.masked_fill((places < start)[:, :, None], -torch.inf)
        return states.amax(1)
    weights = (places + 1.0 if mode == "weightedmean" else torch.ones_like(places, dtype=torch.float32))[None]
    if start is not None:
        weights = weights * (places >= start)
    total = weights.sum(1, keepdim=True)
    if mode == "mean_sqrt_len_tokens":
        total = total.sqrt()
    if mode != "weightedmean" and start is None:
        return states.sum(1) / total
    return (states * weights[:, :, None]).sum(1) / total
