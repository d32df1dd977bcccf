"""Triton kernel for decodes and drafts: attention of single tokens over the paged KV cache without gathering.

Imported only where Triton is installed; the tests run it in Triton's interpreter on a CPU. One program per
token and KV head walks the blocks of the token's history with an online softmax (Dao: FlashAttention-2), so
the history is read once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.torch.attention_metadata import DecodeMetadata

TILE = 64
"""Positions per iteration of a program's loop."""
MIN_DOT_ROWS = 16
"""Minimum rows of a tensor core's product; fewer query heads are padded."""


@triton.jit  # type: ignore[untyped-decorator]
def _decode(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    output,
    table,
    lengths,
    slopes,
    scaling,
    table_width,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    length = tl.load(lengths + row)
    group = tl.arange(0, GROUP_PADDED)
    size = tl.arange(0, SIZE_PADDED)
    own = (row * KV_HEADS + head).to(tl.int64) * GROUP + group
    within = (group < GROUP)[:, None] & (size < SIZE)[None, :]
    q = tl.load(query + own[:, None] * SIZE + size[None, :], mask=within, other=0.0)
    if ALIBI:
        slope = tl.load(slopes + head * GROUP + group, mask=group < GROUP, other=0.0)
    most = tl.full((GROUP_PADDED,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PADDED,), tl.float32)
    sums = tl.zeros((GROUP_PADDED, SIZE_PADDED), tl.float32)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // TILE * TILE
    for start in range(first, length, TILE):
        position = start + tl.arange(0, TILE)
        seen = position < length
        if WINDOW > 0:
            seen = seen & (position >= length - WINDOW)
        page = tl.load(table + row * table_width + position // BLOCK_SIZE, mask=seen, other=0)
        at = ((page.to(tl.int64) * KV_HEADS + head) * BLOCK_SIZE + position % BLOCK_SIZE) * SIZE
        there = seen[:, None] & (size < SIZE)[None, :]
        k = tl.load(keys + at[:, None] + size[None, :], mask=there, other=0.0)
        # rounded like transformers' eager attention, which stores these in the model's dtype
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if q.dtype == tl.float16:
            scores = tl.minimum(tl.maximum(scores, -65504.0), 65504.0)
        scores = (scores.to(q.dtype).to(tl.float32) * scaling).to(q.dtype).to(tl.float32)
        if SOFTCAP > 0:
            # tanh(x) = 1 - 2 / (exp(2x) + 1)
            capped = (scores / SOFTCAP).to(q.dtype).to(tl.float32)
            capped = (1.0 - 2.0 / (tl.exp(2.0 * capped) + 1.0)).to(q.dtype).to(tl.float32)
            scores = (SOFTCAP * capped).to(q.dtype).to(tl.float32)
        if ALIBI:
            scores -= slope[:, None] * (length - 1 - position)[None, :]
        scores = tl.where(seen[None, :], scores, float("-inf"))
        greater = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp(scores - greater[:, None])
        shrunk = tl.exp(most - greater)
        v = tl.load(values + at[:, None] + size[None, :], mask=there, other=0.0)
        total = total * shrunk + tl.sum(weights, 1)
        sums = sums * shrunk[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        most = greater
    tl.store(output + own[:, None] * SIZE + size[None, :], sums / total[:, None], mask=within)


def paged_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    decodes: DecodeMetadata,
    scaling: float,
    window: int | None,
    softcap: float | None,
    slopes: Tensor | None,
) -> Tensor:
    """Attention of query [N, H, D] → [N, H, D]; ``scaling``: factor of the scores.

    keys, values [blocks, KV heads, block size, D]; slopes float32[KV heads, H / KV heads] for ALiBi.
    """
    rows, heads, size = query.shape
    _, kv_heads, block_size, _ = keys.shape
    group = heads // kv_heads
    query = query.contiguous()
    output = torch.empty_like(query)
    _decode[(rows, kv_heads)](
        query,
        keys,
        values,
        output,
        decodes.table,
        decodes.length,
        slopes if slopes is not None else decodes.length,  # unused without ALIBI
        scaling,
        decodes.table.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_PADDED=max(MIN_DOT_ROWS, triton.next_power_of_2(group)),
        SIZE=size,
        SIZE_PADDED=max(MIN_DOT_ROWS, triton.next_power_of_2(size)),
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        SOFTCAP=softcap or 0.0,
        ALIBI=slopes is not None,
        TILE=TILE,
    )
    return output
