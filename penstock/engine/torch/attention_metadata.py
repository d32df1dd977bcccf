"""Attention metadata of a step whose histories are gathered: cache addresses, which every layer uses.

A step's tokens are one flat sequence [T]: first single tokens (decodes), then decodes with drafts, then
chunks of prompts. They are computed in parts: streams of similar length, padded to the longest of them, so
that a part is one set of tensor operations with little padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.schedule.batch import Batch
from penstock.engine.schedule.block_tables import NULL_BLOCK, BlockTables
from penstock.engine.torch.transfer import to_device

PADDING = 1.25
"""A part ends where the next stream is longer than its shortest one times this factor plus PADDING_SLACK."""
PADDING_SLACK = 64
TILE = 256
"""Tokens of one prompt that are computed together: bounds the mask of a long prompt, and skips most of the
scores that causality would mask."""
FEW_SINGLES = 32
"""Single tokens that are padded to the width of short drafts beside them: a part of their own costs each
layer 0.4 ms more, and padding them a fifth of that."""
DRAFT_WIDTHS = 5, 9, 17
"""Decodes with drafts of up to these tokens are not padded to more, so that at most about half is padding."""

Ints = NDArray[np.int64]


@dataclass(slots=True, frozen=True)
class Scoring:
    """How a layer's scores come from products of queries and keys."""

    scale: float
    window: int | None = None
    """Tokens attended to, the query's own included; None: all."""
    softcap: float | None = None
    """Bound of the scores by a tanh (Gemma 2)."""
    slopes: Tensor | None = None
    """float32[KV heads, H / KV heads], which lower a head's scores by the key's distance (ALiBi)."""
    sinks: Tensor | None = None
    """[H]: a score of each head, of a position that has no value (GPT-OSS)."""
    chunk: int | None = None
    """Positions are cut into chunks of so many, a token attends to its own (Llama 4); None: they are not."""


@dataclass(slots=True, frozen=True)
class CacheGeometry:
    """The shape of a layer's cache, and how much of it is gathered."""

    kv_heads: int
    head_size: int
    gathered: int
    """Maximum elements of keys that one part gathers, unless a single stream has more."""


@dataclass(slots=True, frozen=True)
class AttentionPart:
    """n streams with C tokens each, padded to C; decodes have C = 1."""

    tokens: slice | Tensor
    """Indexes into the flat batch: int64[n * C], or a slice where nothing is padded."""
    real: Tensor | None
    """int64[R]: which of the n * C are not padding; None: all."""
    pages: Tensor
    """int64[n * KV heads * blocks]: (block, head) pairs that hold the histories, padded by the null block."""
    own: Tensor
    """int64[n, C]: each token's position in its history."""
    length: int
    """L: positions of each stream in ``pages``."""
    reach: Tensor | None = None
    """int64[n, C]: the last position that each token attends to; None: its own."""


@dataclass(slots=True, frozen=True)
class AttentionMetadata:
    """Where a step writes its tokens' keys and values, and the parts in which it attends."""

    writes: Tensor
    """int64[T * KV heads]: row of each token's key and value, head by head, in a cache of rows."""
    parts: list[AttentionPart]


def build_attention_metadata(
    batch: Batch,
    blocks: BlockTables,
    positions: Ints,
    geometry: CacheGeometry,
    device: torch.device,
    reach: Ints | None = None,
) -> AttentionMetadata:
    """The metadata of a batch whose parts have blocks for all their tokens. ``positions`` int64[T]: of
    :func:`token_positions`; ``reach`` int64[T]: the last position that each token attends to, within its
    part; None: its own."""
    owners = np.repeat(batch.slots, batch.count)
    writes = _to(_cache_writes(blocks, geometry, owners, positions), device)
    maker = _PartMaker(batch, blocks, geometry, device, reach)
    if _is_one_kind(batch):
        return AttentionMetadata(writes, [*maker.drafts(0), *maker.prefills()])
    parts = [*maker.decodes(), *maker.drafts(batch.singles), *maker.prefills()]
    return AttentionMetadata(writes, parts)


def _is_one_kind(batch: Batch) -> bool:
    """Whether single tokens are computed like drafts, padded to their width."""
    drafts = batch.count[batch.singles : batch.decodes]
    return bool(len(drafts)) and batch.singles <= FEW_SINGLES and int(drafts.max()) <= DRAFT_WIDTHS[0]


def dummy_attention_metadata(
    block_size: int, geometry: CacheGeometry, device: torch.device
) -> AttentionMetadata:
    """The metadata of one token without a stream, in the null block, whose contents are never used."""
    first = NULL_BLOCK * geometry.kv_heads + np.arange(geometry.kv_heads)
    own = np.zeros((1, 1), np.int64)
    part = AttentionPart(
        tokens=slice(0, 1), real=None, pages=_to(first, device), own=_to(own, device), length=block_size
    )
    return AttentionMetadata(_to(first * block_size, device), [part])


def _cache_writes(
    blocks: BlockTables, geometry: CacheGeometry, owners: NDArray[np.intp], positions: Ints
) -> Ints:
    """int64[T * KV heads]: where the keys and values of tokens go, for ``AttentionMetadata.writes``.

    owners: the slot of each token.
    """
    block, offset = np.divmod(blocks.cache_rows(owners, positions), blocks.block_size)
    heads = np.arange(geometry.kv_heads)
    writes = (block[:, None] * geometry.kv_heads + heads) * blocks.block_size + offset[:, None]
    return writes.reshape(-1)


def token_positions(batch: Batch) -> Ints:
    """int64[T]: the history position of each token of the flat batch."""
    ends = np.cumsum(batch.count)
    within = np.arange(int(ends[-1])) - np.repeat(ends - batch.count, batch.count)
    positions: Ints = np.repeat(batch.start, batch.count) + within
    return positions


class _PartMaker:
    """Cut a batch into parts of similar length."""

    def __init__(
        self,
        batch: Batch,
        blocks: BlockTables,
        geometry: CacheGeometry,
        device: torch.device,
        reach: Ints | None,
    ) -> None:
        self._batch = batch
        self._reach = reach
        self._blocks = blocks
        self._geometry = geometry
        self._device = device

    def decodes(self) -> Iterator[AttentionPart]:
        """Parts of the single tokens, which are sorted by length."""
        batch = self._batch
        start = batch.start[: batch.singles].astype(np.int64)
        for first, last in self._ranges(start + 1, np.ones_like(start)):
            yield AttentionPart(
                tokens=slice(first, last),
                real=None,
                pages=self._pages(batch.slots[first:last], int(start[last - 1]) + 1),
                own=_to(start[first:last, None], self._device),
                length=self._padded(int(start[last - 1]) + 1),
            )

    def drafts(self, first: int) -> Iterator[AttentionPart]:
        """Parts of the decodes from ``first`` on, those with drafts, of similar width and length."""
        batch = self._batch
        chosen = slice(first, batch.decodes)
        count = batch.count[chosen].astype(np.int64)
        if not len(count):
            return
        start = batch.start[chosen].astype(np.int64)
        row = (np.cumsum(batch.count) - batch.count)[chosen]
        width = np.searchsorted(DRAFT_WIDTHS, count)
        end = start + count
        order = np.lexsort((count, end, width))
        ends = np.cumsum(np.bincount(width, minlength=len(DRAFT_WIDTHS) + 1))
        for alike in np.split(order, ends[:-1]):
            slots = batch.slots[chosen][alike]
            yield from self._padded_parts(slots, row[alike], start[alike], count[alike], end[alike])

    def prefills(self) -> Iterator[AttentionPart]:
        """Parts of the prompt chunks, cut into tiles; tiles of similar width and length are padded alike."""
        yield from self._padded_parts(*self._tiles())

    def _padded_parts(
        self, slots: NDArray[np.intp], row: Ints, start: Ints, count: Ints, end: Ints
    ) -> Iterator[AttentionPart]:
        """Parts of ``count`` tokens from position ``start`` of each slot, the first of which is at ``row`` in
        the flat batch; sorted by ``end``, behind the last position that they attend to."""
        for first, last in self._ranges(end, count):
            most = int(count[first:last].max())
            longest = int(end[last - 1])
            within = np.arange(most)
            real = within < count[first:last, None]
            # a padding query repeats its stream's first token; its output is dropped
            tokens = row[first:last, None] + np.where(real, within, 0)
            yield AttentionPart(
                tokens=_to(tokens.reshape(-1), self._device),
                real=None if real.all() else _to(np.flatnonzero(real), self._device),
                pages=self._pages(slots[first:last], longest),
                own=_to(start[first:last, None] + np.where(real, within, 0), self._device),
                length=self._padded(longest),
                reach=None if self._reach is None else _to(self._reach[tokens], self._device),
            )

    def _tiles(self) -> tuple[NDArray[np.intp], Ints, Ints, Ints, Ints]:
        """Slot, first row in the flat batch, start, count and end of each tile, sorted by end and count."""
        batch = self._batch
        rows = np.cumsum(batch.count) - batch.count
        chunks = slice(batch.decodes, None)
        tiles = -(-batch.count[chunks] // TILE)
        skipped = TILE * (np.arange(int(tiles.sum())) - np.repeat(np.cumsum(tiles) - tiles, tiles))
        count = np.minimum(np.repeat(batch.count[chunks], tiles) - skipped, TILE)
        start = np.repeat(batch.start[chunks], tiles) + skipped
        row = np.repeat(rows[chunks], tiles) + skipped
        end = start + count
        if self._reach is not None and len(row):
            end = np.maximum.reduceat(self._reach, row) + 1
        order = np.lexsort((count, end))
        slots = np.repeat(batch.slots[chunks], tiles)
        return slots[order], row[order], start[order], count[order], end[order]

    def _ranges(self, length: Ints, width: Ints) -> Iterator[tuple[int, int]]:
        """Ranges of streams that form a part. ``length`` is in ascending order."""
        per_token = self._geometry.kv_heads * self._geometry.head_size
        first = 0
        while first < len(length):
            most = PADDING * int(length[first]) + PADDING_SLACK
            last = int(np.searchsorted(length, most, side="right"))
            # a part has width x length scores per stream and head beside the keys it gathers
            weight = self._padded(int(length[last - 1])) * max(per_token, int(width[first:last].max()))
            last = min(last, first + max(1, self._geometry.gathered // weight))
            yield first, last
            first = last

    def _pages(self, slots: NDArray[np.intp], longest: int) -> Tensor:
        table = self._blocks.table[slots, : self._blocks.blocks_for(longest)].astype(np.int64)
        heads = np.arange(self._geometry.kv_heads)
        pages = table[:, None, :] * self._geometry.kv_heads + heads[:, None]
        return _to(pages.reshape(-1), self._device)

    def _padded(self, length: int) -> int:
        return self._blocks.blocks_for(length) * self._blocks.block_size


def _to(array: Any, device: torch.device) -> Tensor:
    return to_device(np.ascontiguousarray(array, np.int64), device)
