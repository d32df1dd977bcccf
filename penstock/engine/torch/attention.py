"""Attention over a paged KV cache, for the attention interface of transformers' model definitions.

A step's tokens are one flat sequence [1, T]: first N single tokens (decodes), then chunks of prompts. Keys
and values of all of them are written to the cache, then each part attends to its own stream's history.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ..blocks import BlockTables
from ..scheduler import Batch

GROUP_GROWTH = 1.25
"""Decodes are padded to the longest of their group; a group ends when the next stream is this much longer."""
GROUP_SLACK = 64
"""Tokens by which streams of a group may always differ."""


@dataclass(slots=True)
class DecodeGroup:
    """Single tokens of streams of similar length L: rows ``first`` to ``last`` of the flat batch."""

    first: int
    last: int
    cache_rows: Tensor
    """int64[n * L]: where the history lies in the flat cache, padded with the null block."""
    length: Tensor
    """int64[n, 1]: tokens of each stream's history, the single one included."""
    longest: int


@dataclass(slots=True)
class Chunk:
    """Consecutive tokens of one stream: rows ``first`` to ``last`` of the flat batch."""

    first: int
    last: int
    start: int
    """Position of the first one in its history."""
    cache_rows: Tensor
    """int64[start + last - first]"""


@dataclass(slots=True)
class StepLayout:
    """Where a step's tokens lie, made once per step and used by every layer."""

    cache_rows: Tensor
    """int64[T]: where each token's key and value go."""
    groups: list[DecodeGroup]
    chunks: list[Chunk]


def lay_out(batch: Batch, blocks: BlockTables, device: torch.device) -> StepLayout:
    """The layout of a batch whose parts own blocks for all their tokens."""
    ends = np.cumsum(batch.count)
    within = np.arange(int(ends[-1])) - np.repeat(ends - batch.count, batch.count)
    positions = np.repeat(batch.start, batch.count) + within
    rows = blocks.cache_rows(np.repeat(batch.slots, batch.count), positions)
    return StepLayout(
        _to(rows, device),
        [_group(batch, first, last, blocks, device) for first, last in _group_bounds(batch)],
        [_chunk(batch, part, int(ends[part]), blocks, device) for part in range(batch.singles, len(batch))],
    )


def _group_bounds(batch: Batch) -> Iterable[tuple[int, int]]:
    """Ranges of the singles, which stand in order of length."""
    first = 0
    while first < batch.singles:
        most = GROUP_GROWTH * int(batch.start[first]) + GROUP_SLACK
        last = int(np.searchsorted(batch.start[: batch.singles], most, side="right"))
        yield first, last
        first = last


def _group(batch: Batch, first: int, last: int, blocks: BlockTables, device: torch.device) -> DecodeGroup:
    slots = batch.slots[first:last]
    length = batch.start[first:last].astype(np.int64) + 1
    longest = int(length[-1])
    size = blocks.block_size
    table = blocks.table[slots, : blocks.blocks_for(longest)].astype(np.int64)
    rows = (table[:, :, None] * size + np.arange(size)).reshape(len(slots), -1)[:, :longest]
    return DecodeGroup(first, last, _to(rows.reshape(-1), device), _to(length[:, None], device), longest)


def _chunk(batch: Batch, part: int, end: int, blocks: BlockTables, device: torch.device) -> Chunk:
    count, start = int(batch.count[part]), int(batch.start[part])
    positions = np.arange(start + count)
    rows = blocks.cache_rows(np.full(len(positions), batch.slots[part]), positions)
    return Chunk(end - count, end, start, _to(rows, device))


def _to(array: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


class PagedAttention:
    """Keys and values of all layers, and the attention function that reads and writes them.

    ``keys`` and ``values``: per layer, [rows of the flat cache, KV heads, head size].
    """

    def __init__(
        self, layers: int, rows: int, heads: int, head_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.keys = [_zeros((rows, heads, head_size), dtype, device) for _ in range(layers)]
        self.values = [_zeros((rows, heads, head_size), dtype, device) for _ in range(layers)]
        self.layout: StepLayout | None = None
        """Set before each forward pass."""

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **ignored: Any,
    ) -> tuple[Tensor, None]:
        """query [1, H, T, D]; key and value [1, KV heads, T, D]. Returns [1, T, H, D]."""
        layout = self.layout
        assert layout is not None
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        keys, values = self.keys[layer], self.values[layer]
        keys.index_copy_(0, layout.cache_rows, key[0].transpose(0, 1))
        values.index_copy_(0, layout.cache_rows, value[0].transpose(0, 1))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        flat = query[0].transpose(0, 1)  # [T, H, D]
        output = torch.empty_like(flat)
        for group in layout.groups:
            output[group.first : group.last] = _decode(
                flat[group.first : group.last], keys, values, group, scale, sliding_window, softcap
            )
        for chunk in layout.chunks:
            output[chunk.first : chunk.last] = _prefill(
                flat[chunk.first : chunk.last], keys, values, chunk, scale, sliding_window, softcap
            )
        return output[None], None


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose pages the operating system commits only when they are written (on a CPU)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def _decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    group: DecodeGroup,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """query [n, H, D] → [n, H, D]. The heads of one KV head are its query's rows: nothing is repeated."""
    count, heads, size = query.shape
    kv_heads = keys.shape[1]
    shape = (count, group.longest, kv_heads, size)
    key = keys.index_select(0, group.cache_rows).view(shape).transpose(1, 2)
    value = values.index_select(0, group.cache_rows).view(shape).transpose(1, 2)
    grouped = query.view(count, kv_heads, heads // kv_heads, size)
    position = torch.arange(group.longest, device=query.device)
    visible = position < group.length
    if window is not None:
        visible &= position >= group.length - window
    mask = visible[:, None, None, :]
    return _attend(grouped, key, value, mask, scale, softcap).reshape(count, heads, size)


def _prefill(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    chunk: Chunk,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """query [C, H, D] → [C, H, D], each token attending to what comes before it, and to itself."""
    count, heads, size = query.shape
    kv_heads = keys.shape[1]
    key = keys.index_select(0, chunk.cache_rows).transpose(0, 1)  # [KV heads, L, D]
    value = values.index_select(0, chunk.cache_rows).transpose(0, 1)
    grouped = query.transpose(0, 1).reshape(kv_heads, heads // kv_heads, count, size)
    position = torch.arange(key.shape[1], device=query.device)
    own = position[chunk.start :, None]
    visible = position <= own
    if window is not None:
        visible &= position > own - window
    attended = _attend(grouped, key[:, None], value[:, None], visible, scale, softcap)
    return attended.reshape(heads, count, size).transpose(0, 1)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """Softmax attention; ``mask`` is true where a key is visible. Gemma2 caps the scores by tanh."""
    if softcap is None:
        key, value = key.expand(*query.shape[:-2], -1, -1), value.expand(*query.shape[:-2], -1, -1)
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scores = torch.matmul(query, key.transpose(-1, -2)) * scale
    scores = (torch.tanh(scores / softcap) * softcap).masked_fill(~mask, -torch.inf)
    return torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype), value)
