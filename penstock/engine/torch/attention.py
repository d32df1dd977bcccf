"""Paged attention: writes keys and values to the KV cache, and attends over it. CPU and fallback in PyTorch.

It implements the attention interface of transformers' model definitions. Keys and values of all of a step's
tokens are written to the cache, then they attend to their streams' histories: by a kernel that reads the
cache in place, or part by part of the step's layout, over copies of the histories.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from penstock.config.errors import ConfigError, one_line
from penstock.engine.schedule.batch import Batch
from penstock.engine.schedule.block_tables import BlockTables
from penstock.engine.torch.attention_metadata import (
    AttentionMetadata,
    AttentionPart,
    CacheGeometry,
    Scoring,
    build_attention_metadata,
)
from penstock.engine.torch.batch_invariance import Product, attention_product
from penstock.engine.torch.cuda.paged_layout import DeviceTables, PagedLayout
from penstock.engine.torch.families.bloom import alibi_slopes
from penstock.engine.torch.memory import zeros
from penstock.engine.torch.model_loader import ModelShape
from penstock.engine.torch.transfer import to_device

log = logging.getLogger(__name__)

Layout = Mapping[int, AttentionMetadata] | PagedLayout
"""Of a step: for kernels, or by the number of KV heads of a layer."""


@dataclass(slots=True, frozen=True)
class Kernel:
    """Attention that reads the cache in place."""

    attend: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, PagedLayout, Scoring], Tensor]
    """:func:`penstock.engine.torch.cuda.kernels.paged_attention`."""
    tokens_per_tile: Callable[[int, int, torch.dtype], int]
    """From query heads per KV head, head size and dtype: tokens of a prompt that are computed together."""


CPU_GATHERED = 1 << 20
"""Elements of keys gathered at once: 4 MB in float32, which fit a core's share of the CPU cache."""
DEVICE_GATHERED = 1 << 26
BY_HAND = 17
"""Tokens per stream up to which all scores are held in memory, so that a key is not repeated for the query
heads that share it. In float32 on a CPU, 8 streams of 64 tokens with 2 KV heads of 4 query heads: 0.16 ms for
2 tokens a stream against 0.19, 0.6 against 0.5 for 17, 1.0 against 1.0 for 33; a stream of 4,096 tokens with
8 KV heads of 4: 7.7 ms against 13.2, 25 against 36, 41 against 49; 256 tokens take twice as long."""
MAX_SCORES = 1 << 25
"""Scores held at once, unless a single query of each stream has more: 128 MB in float32."""
OLDEST_CAPABILITY = (8, 0)
"""Compute capability of GPUs that have the shared memory and the bfloat16 of the kernels."""
MAX_IN_CACHE = 1e15
"""Keys and values of an adapter's rows are bounded by it; a key's product with any sane query is finite."""


class PagedAttention:
    """Keys and values of all layers, and the attention function that reads and writes them.

    ``keys`` and ``values``: per layer, [blocks, KV heads, block size, head size], which may
    be another one for values.
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
        tables: DeviceTables | None = None,
        batch_invariant: bool = False,
    ) -> None:
        """``kernel`` reads histories by ``tables``; None: they are gathered.
        ``batch_invariant``: what a token gets has the same bits in any part. Raises ConfigError if this
        machine does not allow that."""
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        sizes: dict[int, set[tuple[int, int]]] = {}
        for layer in range(shape.layers):
            kv_heads, size, value_size = shape.cached(layer)
            sizes.setdefault(kv_heads, set()).add((size, value_size))
            if (
                layer in shape.reused
            ):  # it gets what that layer got, and writes it once more to the same place
                self.keys.append(self.keys[shape.reused[layer]])
                self.values.append(self.values[shape.reused[layer]])
            else:
                pages = blocks, kv_heads, block_size
                self.keys.append(zeros((*pages, size), dtype, device))
                self.values.append(zeros((*pages, value_size), dtype, device))
        gathered = CPU_GATHERED if device.type == "cpu" else DEVICE_GATHERED
        self.geometries = [
            CacheGeometry(kv_heads, max(map(max, found)), gathered) for kv_heads, found in sizes.items()
        ]
        self.tables = tables
        self._kernel = kernel
        groups = [(shape.heads // kv_heads, *each) for kv_heads, found in sizes.items() for each in found]
        self._tile = 0
        if kernel is not None:
            self._tile = min(kernel.tokens_per_tile(group, size, dtype) for group, size, _ in groups)
        self._slopes = _slopes(shape, device) if shape.alibi else None
        self._products: dict[tuple[int, int], Product] = {}
        """By query heads per KV head and the size of keys; others are computed as it is fastest."""
        if batch_invariant:
            for group, *each in groups:
                self._products[group, each[0]] = attention_product(_attend_alone, group, *each)
        self.layout: Layout | None = None
        """Set before each forward pass."""
        self.bounds_rows = False
        """Set before each forward pass: whether some rows may overflow (:func:`_bounded`)."""

    def layout_of(
        self,
        batch: Batch,
        blocks: BlockTables,
        positions: NDArray[np.int64],
        device: torch.device,
        reach: NDArray[np.int64] | None = None,
    ) -> tuple[Tensor, Layout]:
        """int64[T]: ``positions`` on the device; and the layout of a batch whose parts have blocks for all
        their tokens. ``reach``: see :func:`build_attention_metadata`."""
        if self.tables is None:
            layout = {
                geometry.kv_heads: build_attention_metadata(batch, blocks, positions, geometry, device, reach)
                for geometry in self.geometries
            }
            return to_device(positions, device), layout
        columns = [positions, np.repeat(batch.slots, batch.count), *([] if reach is None else [reach])]
        places, owners, *seen = to_device(np.stack(columns), device).unbind()
        layout_of_tables = self.tables.layout(batch, owners, places, blocks, self._tile)
        return places, replace(layout_of_tables, reach=seen[0]) if seen else layout_of_tables

    def __call__(  # noqa: PLR0913 - as transformers calls it
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
        s_aux: Tensor | None = None,
        chunk: int | None = None,
        query_scale: Tensor | None = None,
        **ignored: Any,
    ) -> tuple[Tensor, None]:
        """query [1, H, T, D]; key [1, KV heads, T, D], value [1, KV heads, T, V]; s_aux [H]: sinks;
        query_scale [1, T]: factors of queries. Returns [1, T, H, V]."""
        if query_scale is not None:
            query = (query * query_scale[:, None, :, None]).to(query.dtype)
        if self.bounds_rows:
            key, value = _bounded(key), _bounded(value)
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        keys, values = self.keys[layer], self.values[layer]
        size = query.shape[-1]
        scaling = size**-0.5 if scaling is None else float(scaling)
        flat, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
        scoring = Scoring(scaling, sliding_window, softcap, self._slopes, s_aux, chunk)
        if isinstance(self.layout, PagedLayout):
            assert self._kernel is not None
            return self._kernel.attend(flat, key, value, keys, values, self.layout, scoring)[None], None
        assert self.layout is not None
        layout = self.layout[keys.shape[1]]
        product = self._products.get((flat.shape[1] // keys.shape[1], size))
        tokens = len(layout.writes) // key.shape[1]  # others pad the step
        padding, flat = len(flat) - tokens, flat[:tokens]
        keys.view(-1, size).index_copy_(0, layout.writes, key[:tokens].reshape(-1, size))
        width = values.shape[-1]
        values.view(-1, width).index_copy_(0, layout.writes, value[:tokens].reshape(-1, width))
        output = flat.new_empty((tokens, flat.shape[1], width))
        for part in layout.parts:
            attended = _attend(flat[part.tokens], keys, values, part, scoring, product)
            if part.real is None:
                output[part.tokens] = attended
            else:
                assert isinstance(part.tokens, Tensor)
                output[part.tokens[part.real]] = attended[part.real]
        return pad(output, (0, 0, 0, 0, 0, padding))[None] if padding else output[None], None


def find_kernel(device: torch.device) -> Kernel | None:
    """The Triton kernels, on a CUDA device that has what they need; PyTorch for CUDA brings Triton. Raises
    ConfigError when they cannot be compiled here."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        log.warning(
            "attention runs without kernels, many times slower: this GPU has compute capability %d.%d, and "
            "they need %d.%d",
            *capability,
            *OLDEST_CAPABILITY,
        )
        return None
    from penstock.engine.torch.cuda.kernels import paged_attention, probe, tokens_per_tile

    try:
        probe(device)
    except Exception as error:
        raise ConfigError(
            f"--device cuda: the attention kernels cannot be compiled here; Triton needs a C compiler, "
            f"Python's headers and a directory for its cache: {one_line(error)}"
        ) from error
    return Kernel(paged_attention, tokens_per_tile)


def _bounded(values: Tensor) -> Tensor:
    """Without NaN and infinities, and with products that are finite.

    An adapter with absurd weights overflows in its own rows. In the cache these values would outlive its
    streams, and attention multiplies masked positions by zero instead of leaving them out: another stream
    that gets the block would read NaN.
    """
    most = min(MAX_IN_CACHE, torch.finfo(values.dtype).max)
    return values.nan_to_num(0.0, most, -most).clamp_(-most, most)


def _slopes(shape: ModelShape, device: torch.device) -> Tensor:
    """float32[KV heads, G]: ALiBi slopes of the G query heads that share a KV head."""
    return torch.tensor(alibi_slopes(shape.heads), device=device).view(shape.kv_heads, -1)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    part: AttentionPart,
    scoring: Scoring,
    product: Product | None,
) -> Tensor:
    """Attention of query [n * C, H, D] to what is before it, or in reach → [n * C, H, V].

    ``product`` computes all widths alike; None: each as it is fastest.
    """
    window, softcap, slopes, sinks = scoring.window, scoring.softcap, scoring.slopes, scoring.sinks
    _, heads, size = query.shape
    kv_heads = keys.shape[1]
    streams, width = part.own.shape
    pairs, group = streams * kv_heads, heads // kv_heads
    key = _gather(keys, part).view(pairs, part.length, size)
    value = _gather(values, part).view(pairs, part.length, -1)
    own = part.own[:, None, None, :, None]
    distance = own - torch.arange(part.length, device=query.device)
    hidden = distance < 0  # [n, 1, 1, C, L]
    if part.reach is not None:
        hidden = distance < own - part.reach[:, None, None, :, None]
    if window is not None:
        hidden |= distance >= window
    if scoring.chunk is not None:
        hidden |= distance > own % scoring.chunk
    # query heads that share a KV head become neighbours: [n, KV heads, G, C, D]
    grouped = query.reshape(streams, width, kv_heads, group, size).permute(0, 2, 3, 1, 4)
    by_hand = product is not None or width <= BY_HAND or softcap is not None
    if by_hand or slopes is not None or sinks is not None or _is_emulated(query):
        bias = None if slopes is None else -slopes[None, :, :, None, None] * distance
        attended = _in_tiles(grouped, key, value, hidden, scoring, bias, product or _product)
    else:
        shape = (pairs, group, part.length, -1)
        visible = (~hidden).expand(-1, kv_heads, -1, -1, -1).reshape(pairs, 1, width, -1)
        attended = scaled_dot_product_attention(
            grouped.reshape(pairs, group, width, size),
            key[:, None].expand(shape),
            value[:, None].expand(shape),
            attn_mask=visible,
            scale=scoring.scale,
        )
    return attended.reshape(streams, heads, width, -1).transpose(1, 2).flatten(0, 1)


def _gather(cache: Tensor, part: AttentionPart) -> Tensor:
    """The part's pages in order: all positions of a stream's KV head, then of its next KV head."""
    return cache.view(-1, cache.shape[2] * cache.shape[3]).index_select(0, part.pages)


def _attend_alone(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, product: Product) -> Tensor:
    hidden = ~visible[:, :, None]
    return _by_hand(query[:, None], key, value, hidden, Scoring(1.0), None, product)[:, 0]


def _in_tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor,
    scoring: Scoring,
    bias: Tensor | None,
    product: Product,
) -> Tensor:
    """:func:`_by_hand` for so many queries of each stream at a time that their scores stay few."""
    streams, kv_heads, group, width, _ = query.shape
    most = max(1, MAX_SCORES // (streams * kv_heads * group * key.shape[1]))
    if width <= most:
        return _by_hand(query, key, value, hidden, scoring, bias, product)
    rows = []
    for first in range(0, width, most):
        tile = slice(first, first + most)
        biased = None if bias is None else bias[..., tile, :]
        rows.append(_by_hand(query[..., tile, :], key, value, hidden[..., tile, :], scoring, biased, product))
    return torch.cat(rows, 3)


def _by_hand(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor,
    scoring: Scoring,
    bias: Tensor | None,
    product: Product,
) -> Tensor:
    """Attention of query [n, KV heads, G, C, D] with key [n * KV heads, L, D] and value [n * KV heads, L, V]
    → [n, KV heads, G, C, V], with all scores in memory. ``hidden`` [n, 1, 1, C, L]: positions that a query
    does not attend to.

    In half precision it rounds where transformers' eager attention does: the product, the scaled and the
    capped scores, and the weights.
    """
    streams, kv_heads, group, width, size = query.shape
    rows = query.reshape(streams * kv_heads, group * width, size)
    scores = product(rows, key.transpose(1, 2)).reshape(streams, kv_heads, group, width, -1)
    if scores.dtype == torch.float16:  # its maximum is 65,504, which products exceed before they are scaled
        scores.clamp_(torch.finfo(torch.float16).min, torch.finfo(torch.float16).max)
    scores.mul_(scoring.scale)
    if scoring.softcap is not None:
        scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    if bias is not None:
        scores = scores + bias
    scores.masked_fill_(hidden, -torch.inf)
    if scoring.sinks is not None:
        sinks = scoring.sinks.to(scores.dtype).view(kv_heads, group, 1, 1)
        scores = torch.cat((scores, sinks.expand(streams, -1, -1, width, -1)), -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype)
    if scoring.sinks is not None:
        weights = weights[..., :-1]
    attended = product(weights.reshape(streams * kv_heads, group * width, -1), value)
    return attended.reshape(streams, kv_heads, group, width, -1)


def _is_emulated(values: Tensor) -> bool:
    """Whether products are computed in float32 and rounded: half precision on a CPU."""
    return values.device.type == "cpu" and values.dtype != torch.float32


def _product(first: Tensor, second: Tensor) -> Tensor:
    """bmm. PyTorch's in half precision rounds once as well, but without AVX-512 it is 5 to 20 times slower
    than one in float32."""
    if not _is_emulated(first):
        return torch.bmm(first, second)
    return torch.bmm(first.float(), second.float()).to(first.dtype)
