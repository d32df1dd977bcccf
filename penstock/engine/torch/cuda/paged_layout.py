"""A step's addresses on the device, for kernels that read the paged cache in place.

A kernel finds a token's keys and values by the block table of its stream, of which the device keeps a copy.
A step sends the owner and the position of each token, and the few entries that its tables have gained since.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.schedule.batch import Batch, row_offsets
from penstock.engine.schedule.block_tables import NULL_BLOCK, BlockTables
from penstock.engine.torch.transfer import to_device
from penstock.wire.arrays import I32

FILLING = 512
"""Programs that fill a device: about four for each multiprocessor of an H100. Where a step has fewer tiles,
several programs share a history."""


@dataclass(slots=True, frozen=True)
class PagedLayout:
    """The T tokens of a step, the first ``singles`` of them tiles by themselves."""

    table: Tensor
    """int32[slots + 1, W]: blocks of each slot; those of the last row, which no stream has, are null."""
    owners: Tensor
    """int64[T]: each token's row of ``table``."""
    positions: Tensor
    """int64[T]: each token's position in its history."""
    singles: int
    tiles: Tensor | None
    """int32[n, 2]: the first token and the number of tokens of tiles, parts of one stream each, which hold
    all tokens behind the first ``singles``; None: there are none."""
    longest: int
    """Positions of the longest history at most."""
    reach: Tensor | None = None
    """int64[T]: the last position that each token of a tile attends to, within its part; None: its own."""


class DeviceTables:
    """The device's copy of the block tables.

    A slot's row only grows until it is emptied, so that most steps send an entry for one stream in
    ``block_size``. Steps that were enqueued before are not affected.
    """

    def __init__(self, slots: int, blocks_per_slot: int, device: torch.device) -> None:
        """Allocate the block tables, 4 bytes per slot and block: 32 MiB for 1,024 slots of 131,072 tokens in
        blocks of 16."""
        self._device = device
        self.table = torch.full((slots + 1, blocks_per_slot), NULL_BLOCK, dtype=torch.int32, device=device)
        self._copied = np.zeros(slots, np.int32)
        """Entries of each row that are on the device."""
        self._emptied = np.zeros(slots, np.int64)
        """How often each row had been emptied when it was copied."""

    @property
    def null_row(self) -> int:
        return len(self.table) - 1

    def copy_new(self, blocks: BlockTables, slots: NDArray[np.intp]) -> None:
        """Enqueue a copy of the entries that the rows of ``slots`` have gained, as far as this copy's rows
        go: those of a draft model end where its positions do."""
        emptied = blocks.emptied[slots]
        self._copied[slots] *= self._emptied[slots] == emptied
        self._emptied[slots] = emptied
        counts = np.minimum(blocks.block_counts[slots], self.table.shape[1])
        known = self._copied[slots]
        grown = np.flatnonzero(counts > known)
        if not len(grown):
            return
        rows, first, added = slots[grown], known[grown], (counts - known)[grown]
        at = np.repeat(first, added) + row_offsets(added)
        owner = np.repeat(rows, added)
        packed = np.stack((owner * self.table.shape[1] + at, blocks.table[owner, at]))
        place, block = to_device(packed, self._device).unbind()
        self.table.view(-1).index_copy_(0, place, block.int())
        self._copied[rows] = counts[grown]

    def layout(
        self, batch: Batch, owners: Tensor, positions: Tensor, blocks: BlockTables, tile: int
    ) -> PagedLayout:
        """The layout of a batch whose parts have blocks for all their tokens. ``owners``, ``positions``
        int64[T], on the device; ``tile``: tokens of a tile at most."""
        self.copy_new(blocks, batch.slots)
        tiles = None
        if batch.singles < len(batch):
            tiles = to_device(cut_tiles(batch, tile), self._device)
        longest = int((batch.start + batch.count).max())
        return PagedLayout(self.table, owners, positions, batch.singles, tiles, longest)

    def null_layout(self, singles: int, tiles: int, longest: int) -> PagedLayout:
        """The layout of tokens without a stream, which write to the null block: ``singles``, and ``tiles``
        tiles of one token."""
        total = singles + tiles
        owners = torch.full((total,), self.null_row, dtype=torch.int64, device=self._device)
        cut = np.stack((np.arange(singles, total), np.ones(tiles)), 1).astype(np.int32)
        return PagedLayout(
            self.table,
            owners,
            torch.zeros_like(owners),
            singles,
            to_device(cut, self._device) if tiles else None,
            longest,
        )


def cut_tiles(batch: Batch, tile: int) -> I32:
    """int32[n, 2]: first token and number of tokens of the tiles of all parts but the single ones, those
    with the longest histories first, as they take the longest."""
    parts = slice(batch.singles, None)
    count = batch.count[parts]
    number = -(-count // tile)
    skipped = tile * row_offsets(number)
    first = np.repeat((np.cumsum(batch.count, dtype=np.int32) - batch.count)[parts], number) + skipped
    own = np.minimum(np.repeat(count, number) - skipped, tile)
    end = np.repeat(batch.start[parts], number) + skipped + own
    order = np.argsort(-end, kind="stable")
    cut: I32 = np.stack((first, own), 1)[order].astype(np.int32)
    return cut
