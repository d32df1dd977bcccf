"""Paged attention: writes keys and values to the KV cache, and attends over it. CPU and fallback in PyTorch.

It implements the attention interface of transformers' model definitions. Keys and values of all of a step's
tokens are written to the cache, then each part of the step's layout attends to its streams' histories.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from penstock.engine.torch.attention_metadata import (
    AttentionMetadata,
    AttentionPart,
    CacheGeometry,
    DecodeMetadata,
)
from penstock.engine.torch.batch_invariance import attention_rows, steady_product
from penstock.engine.torch.bloom import alibi_slopes
from penstock.engine.torch.memory import zeros
from penstock.engine.torch.model_loader import ModelShape

Kernel = Callable[[Tensor, Tensor, Tensor, DecodeMetadata, int | None, float | None, Tensor | None], Tensor]

Product = Callable[[Tensor, Tensor], Tensor]
"""bmm."""

CPU_GATHERED = 1 << 20
"""Elements of keys gathered at once: 4 MB in float32, which fit a core's share of the CPU cache."""
DEVICE_GATHERED = 1 << 26
MOST_IN_CACHE = 1e15
"""Keys and values of an adapter's rows are bounded by it; a key's product with any sane query is finite."""


class PagedAttention:
    """Keys and values of all layers, and the attention function that reads and writes them.

    ``keys`` and ``values``: per layer, [blocks, KV heads, block size, head size].
    """

    def __init__(
        self,
        shape: ModelShape,
        blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kernel: Kernel | None = None,
        batch_invariant: bool = False,
    ) -> None:
        """``kernel`` computes decodes; None: their keys are gathered, like those of prefills.
        ``batch_invariant``: what a token gets has the same bits in any part. Raises ConfigError if this
        machine does not allow that."""
        size = (blocks, shape.kv_heads, block_size, shape.head_size)
        self.keys = [zeros(size, dtype, device) for _ in range(shape.layers)]
        self.values = [zeros(size, dtype, device) for _ in range(shape.layers)]
        gathered = CPU_GATHERED if device.type == "cpu" else DEVICE_GATHERED
        self._kernel = kernel
        self.geometry = CacheGeometry(shape.kv_heads, shape.head_size, gathered, in_place=kernel is not None)
        self._slopes = _slopes(shape, device) if shape.alibi else None
        self._product: Product | None = None
        if batch_invariant:
            rows = attention_rows(_attend_alone, shape.heads // shape.kv_heads, shape.head_size, dtype)
            self._product = partial(steady_product, rows=rows)
        self.layout: AttentionMetadata | None = None
        """Set before each forward pass."""
        self.bounds_rows = False
        """Set before each forward pass: whether some rows may overflow (:func:`_bounded`)."""

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
        if self.bounds_rows:
            key, value = _bounded(key), _bounded(value)
        tokens = len(layout.writes) // key.shape[1]  # others pad the step
        padding = query.shape[2] - tokens
        query, key, value = query[:, :, :tokens], key[:, :, :tokens], value[:, :, :tokens]
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        keys, values = self.keys[layer], self.values[layer]
        size = query.shape[-1]
        keys.view(-1, size).index_copy_(0, layout.writes, key[0].transpose(0, 1).reshape(-1, size))
        values.view(-1, size).index_copy_(0, layout.writes, value[0].transpose(0, 1).reshape(-1, size))
        flat = query[0].transpose(0, 1)  # [T, H, D]
        flat = flat * (size**-0.5 if scaling is None else scaling)
        output = torch.empty_like(flat, memory_format=torch.contiguous_format)
        if layout.decodes is not None:
            assert self._kernel is not None
            first = flat[: len(layout.decodes.length)]
            output[: len(first)] = self._kernel(
                first, keys, values, layout.decodes, sliding_window, softcap, self._slopes
            )
        for part in layout.parts:
            attended = _attend(
                flat[part.tokens], keys, values, part, sliding_window, softcap, self._slopes, self._product
            )
            if part.real is None:
                output[part.tokens] = attended
            else:
                assert isinstance(part.tokens, Tensor)
                output[part.tokens[part.real]] = attended[part.real]
        return pad(output, (0, 0, 0, 0, 0, padding))[None] if padding else output[None], None


def find_kernel(device: torch.device) -> Kernel | None:
    """The Triton decode kernel if the device is CUDA and Triton is installed (PyTorch for CUDA has it)."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from penstock.engine.torch.kernels import paged_decode

    return paged_decode


def _bounded(values: Tensor) -> Tensor:
    """Without NaN and infinities, and with products that are finite.

    An adapter with absurd weights overflows in its own rows. In the cache these values would outlive its
    streams, and attention multiplies masked positions by zero instead of leaving them out: another stream
    that gets the block would read NaN.
    """
    most = min(MOST_IN_CACHE, torch.finfo(values.dtype).max)
    return values.nan_to_num(0.0, most, -most).clamp_(-most, most)


def _slopes(shape: ModelShape, device: torch.device) -> Tensor:
    """float32[KV heads, G]: ALiBi slopes of the G query heads that share a KV head."""
    return torch.tensor(alibi_slopes(shape.heads), device=device).view(shape.kv_heads, -1)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    part: AttentionPart,
    window: int | None,
    softcap: float | None,
    slopes: Tensor | None,
    product: Product | None,
) -> Tensor:
    """Causal attention of scaled query [n * C, H, D] → [n * C, H, D].

    ``window``: tokens attended to, the query's own included; None: all. ``softcap`` bounds the scores by a
    tanh (Gemma 2). ``slopes`` lower a head's scores by the key's distance (ALiBi). ``product`` computes all
    widths alike; None: each as it is fastest.
    """
    _, heads, size = query.shape
    kv_heads = keys.shape[1]
    streams, width = part.own.shape
    pairs, group = streams * kv_heads, heads // kv_heads
    key = _gather(keys, part).view(pairs, part.length, size)
    value = _gather(values, part).view(pairs, part.length, size)
    distance = part.own[:, None, :, None] - torch.arange(part.length, device=query.device)  # [n, 1, C, L]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    visible = visible.expand(-1, kv_heads, -1, -1).reshape(pairs, 1, width, -1)
    # query heads that share a KV head become neighbours: [n * KV heads, G, C, D]
    grouped = query.view(streams, width, kv_heads, group, size).permute(0, 2, 3, 1, 4)
    grouped = grouped.reshape(pairs, group, width, size)
    if product is not None or width == 1 or softcap is not None or slopes is not None:
        bias = None if slopes is None else _alibi(slopes, distance)
        attended = _by_hand(grouped, key, value, visible, softcap, bias, product or torch.bmm)
    else:
        shape = (pairs, group, part.length, size)
        key, value = key[:, None].expand(shape), value[:, None].expand(shape)
        attended = scaled_dot_product_attention(grouped, key, value, attn_mask=visible, scale=1.0)
    return attended.reshape(streams, heads, width, size).transpose(1, 2).reshape(-1, heads, size)


def _alibi(slopes: Tensor, distance: Tensor) -> Tensor:
    """float32[n * KV heads, G, C, L]: the bias of each score."""
    biases = -slopes[None, :, :, None, None] * distance[:, :, None]
    return biases.flatten(0, 1)


def _gather(cache: Tensor, part: AttentionPart) -> Tensor:
    """The part's pages in order: all positions of a stream's KV head, then of its next KV head."""
    return cache.view(-1, cache.shape[2] * cache.shape[3]).index_select(0, part.pages)


def _attend_alone(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, rows: int) -> Tensor:
    return _by_hand(query, key, value, visible, None, None, partial(steady_product, rows=rows))


def _by_hand(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    softcap: float | None,
    bias: Tensor | None,
    product: Product,
) -> Tensor:
    """scaled_dot_product_attention of [P, G, C, D] with [P, L, D], without repeating a key for the G queries
    that share it. It holds all scores in memory, so it is for few queries."""
    pairs, group, width, size = query.shape
    scores = product(query.reshape(pairs, group * width, size), key.transpose(1, 2))
    scores = scores.reshape(pairs, group, width, -1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), -1, dtype=torch.float32)
    return product(weights.to(value.dtype).view(pairs, group * width, -1), value).reshape(query.shape)
