"""What the Triton kernels compute, in PyTorch's operators: a token at a time, over all blocks of its row.

The reference of the kernels, and their place in tests without Triton. No operator reads a tensor on the host,
so that recordings can replay it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.torch.attention import Kernel
from penstock.engine.torch.attention_metadata import Scoring
from penstock.engine.torch.cuda.paged_layout import PagedLayout


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: PagedLayout,
    scoring: Scoring,
) -> Tensor:
    window, softcap, slopes = scoring.window, scoring.softcap, scoring.slopes
    heads = query.shape[1]
    kv_heads, block_size = keys.shape[1:3]
    tables = layout.table.index_select(0, layout.owners).long()
    block = tables.gather(1, layout.positions[:, None] // block_size)
    places = (block * kv_heads + torch.arange(kv_heads, device=keys.device)) * block_size + layout.positions[
        :, None
    ] % block_size
    for cache, new in ((keys, key), (values, value)):
        cache.view(-1, new.shape[-1]).index_copy_(0, places.flatten(), new.flatten(0, 1))
    known, given = (
        cache[tables].transpose(1, 2).flatten(2, 3).repeat_interleave(heads // kv_heads, 1)
        for cache in (keys, values)
    )
    scores = torch.einsum("thd,thld->thl", query, known) * scoring.scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    distance = layout.positions[:, None] - torch.arange(known.shape[2], device=keys.device)
    if slopes is not None:
        scores = scores - slopes.view(1, heads, 1) * distance[:, None]
    hidden = distance < 0
    if layout.reach is not None:
        hidden = distance < (layout.positions - layout.reach)[:, None]
    if window is not None:
        hidden |= distance >= window
    if scoring.chunk is not None:
        hidden |= distance > layout.positions[:, None] % scoring.chunk
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    if scoring.sinks is not None:
        scores = torch.cat((scores, scoring.sinks[:, None].expand(len(scores), -1, 1)), -1)
    weights = torch.softmax(scores, -1)[..., : known.shape[2]]
    return torch.einsum("thl,thld->thd", weights, given)


KERNEL = Kernel(paged_attention, lambda group, size, dtype: 16)
