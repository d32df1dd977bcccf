"""Blocks of the KV cache and which slot holds which: integers only, no tensors.

The cache is cut into blocks of ``block_size`` tokens. A slot's block table lists its blocks in order: the
keys and values of history position p lie in block ``table[slot, p // block_size]`` at ``p % block_size``.
"""

import numpy as np
from numpy.typing import NDArray

from ..wire.frames import I32

NULL_BLOCK = 0
"""Never given out: table entries past a slot's blocks point to it, so that padded reads meet finite zeros."""


class BlockTables:
    """The free blocks, and per slot a row of block ids.

    ``blocks`` counts the blocks that can be given out; the cache needs ``blocks + 1``, for the null block.
    """

    def __init__(self, slots: int, blocks: int, block_size: int, max_model_len: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.table = np.full((slots, -(-max_model_len // block_size)), NULL_BLOCK, np.int32)
        """int32[slots, blocks per slot]"""
        self.owned = np.zeros(slots, np.int32)
        """Blocks in each slot's row."""
        self._free = np.arange(blocks, 0, -1, dtype=np.int32)
        self._free_count = blocks

    def free_count(self) -> int:
        return self._free_count

    def used_share(self) -> float:
        return 1.0 - self._free_count / self.blocks

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def missing(self, slots: NDArray[np.intp], lengths: I32) -> I32:
        """int32[n]: blocks each slot lacks to hold ``lengths`` tokens, at least 0."""
        wanted = -(-lengths // self.block_size)
        missing: I32 = np.maximum(wanted - self.owned[slots], 0)
        return missing

    def take(self, slots: NDArray[np.intp], counts: I32) -> None:
        """Append ``counts`` free blocks to the rows of ``slots``. The caller has made sure they are there."""
        total = int(counts.sum())
        if not total:
            return
        if total > self._free_count:
            raise ValueError(f"{total} KV blocks wanted, {self._free_count} are free")
        taken = self._free[self._free_count - total : self._free_count][::-1]
        self._free_count -= total
        ends = np.cumsum(counts)
        within = np.arange(total) - np.repeat(ends - counts, counts)
        self.table[np.repeat(slots, counts), np.repeat(self.owned[slots], counts) + within] = taken
        self.owned[slots] += counts

    def release(self, slot: int) -> None:
        """Give back all blocks of a slot."""
        count = int(self.owned[slot])
        row = self.table[slot, :count]
        self._free[self._free_count : self._free_count + count] = row[::-1]
        self._free_count += count
        row[:] = NULL_BLOCK
        self.owned[slot] = 0

    def cache_rows(self, slots: NDArray[np.intp], positions: NDArray[np.intp]) -> NDArray[np.int64]:
        """int64[n]: where in the flat cache the token at each (slot, history position) lies."""
        blocks = self.table[slots, positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size
