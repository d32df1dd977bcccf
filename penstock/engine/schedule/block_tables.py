"""The KV cache's block allocator: block tables and free blocks.

Integers only, no tensors. The cache is divided into blocks of ``block_size`` tokens. A slot's block table
lists its blocks in order: the keys and values of history position p are in block
``table[slot, p // block_size]`` at ``p % block_size``.

A block is *in use* while rows of the table refer to it; several rows do if streams share it. It is *idle* if
only the prefix cache has it (:mod:`penstock.engine.schedule.prefix_cache`), which evicts idle blocks when
others are wanted. All others are *free*.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from penstock.engine.batch.sparse_zeros import sparse_zeros
from penstock.wire.arrays import I32

NULL_BLOCK = 0
"""Never allocated, and what an unwritten table has: entries past a slot's blocks point to it, so that padded
reads get finite zeros."""


def _nothing_idle(count: int) -> None:
    raise AssertionError("without a prefix cache no block is idle")


class BlockTables:
    """The free and idle blocks, and a row of block ids per slot.

    ``blocks`` is the number of blocks that can be allocated; the cache has one more, the null block.
    """

    def __init__(self, slots: int, blocks: int, block_size: int, max_model_len: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.table: I32 = sparse_zeros((slots, -(-max_model_len // block_size)), np.int32)
        """int32[slots, blocks per slot]"""
        self.block_counts = np.zeros(slots, np.int32)
        """Blocks in each slot's row."""
        self.emptied = np.zeros(slots, np.int64)
        """How often each slot's row has been emptied; until then it only grows."""
        self.idle = 0
        """Blocks that only the prefix cache has."""
        self.evict: Callable[[int], None] = _nothing_idle
        """Frees a number of idle blocks; set by the prefix cache."""
        self.drafted = np.zeros(blocks + 1, np.bool_)
        """Blocks whose keys and values a draft model has computed, too."""
        self._free = np.arange(blocks, 0, -1, dtype=np.int32)
        self._free_count = blocks

    def free_count(self) -> int:
        """Blocks that can be allocated: free and idle ones."""
        return self._free_count + self.idle

    def usage(self) -> float:
        """Fraction of the blocks that is in use, 0 to 1."""
        return 1.0 - self.free_count() / self.blocks

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    # -- slots allocate and free

    def missing(self, slots: NDArray[np.intp], lengths: I32) -> I32:
        """int32[n]: blocks that each slot lacks to hold ``lengths`` tokens, at least 0."""
        wanted = -(-lengths // self.block_size)
        missing: I32 = np.maximum(wanted - self.block_counts[slots], 0)
        return missing

    def allocate(self, slots: NDArray[np.intp], counts: I32) -> None:
        """Append ``counts`` free blocks to the rows of ``slots``, evicting idle blocks as needed. Raises
        ValueError when there are too few, which the caller must rule out."""
        total = int(counts.sum())
        if not total:
            return
        taken = self._take_free(total)
        ends = np.cumsum(counts)
        within = np.arange(total) - np.repeat(ends - counts, counts)
        self.table[np.repeat(slots, counts), np.repeat(self.block_counts[slots], counts) + within] = taken
        self.block_counts[slots] += counts

    def allocate_one(self, slot: int, count: int) -> None:
        """:meth:`allocate` for one slot."""
        start = int(self.block_counts[slot])
        self.table[slot, start : start + count] = self._take_free(count)
        self.block_counts[slot] = start + count

    def _take_free(self, count: int) -> I32:
        if count > self.free_count():
            raise ValueError(f"{count} KV blocks wanted, {self.free_count()} are free")
        if count > self._free_count:
            self.evict(count - self._free_count)
        self._free_count -= count
        taken = self._free[self._free_count : self._free_count + count][::-1]
        self.drafted[taken] = False
        return taken

    def share(self, slot: int, blocks: I32) -> None:
        """Make cached blocks the first blocks of a slot that has none."""
        self.table[slot, : len(blocks)] = blocks
        self.block_counts[slot] = len(blocks)

    def take_blocks(self, slot: int) -> I32:
        """Empty the row of a slot. Returns its blocks, which the caller frees or caches."""
        row = self.table[slot, : int(self.block_counts[slot])]
        blocks = row.copy()
        row[:] = NULL_BLOCK
        self.block_counts[slot] = 0
        self.emptied[slot] += 1
        return blocks

    def free(self, blocks: I32) -> None:
        """Free blocks that neither a row nor the prefix cache refers to."""
        self._free[self._free_count : self._free_count + len(blocks)] = blocks[::-1]
        self._free_count += len(blocks)

    # -- token addresses

    def cache_rows(self, slots: NDArray[np.intp], positions: NDArray[np.intp]) -> NDArray[np.int64]:
        """int64[n]: index in the flat cache of the token at each (slot, history position)."""
        blocks = self.table[slots, positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size
