"""The KV cache's block allocator: block tables, reference counts, freeing, and LRU eviction of cached blocks.

Integers only, no tensors. The cache is divided into blocks of ``block_size`` tokens. A slot's block table
lists its blocks in order: the keys and values of history position p are in block
``table[slot, p // block_size]`` at ``p % block_size``.

A block is *in use* while rows of the table refer to it; shared blocks have several references. A full block
can be cached under a digest. A cached block without references is *idle*: it is shared with the next stream
that looks up the digest, or evicted when blocks run out, least recently used first. All others are *free*.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.wire.arrays import I32

NULL_BLOCK = 0
"""Never allocated: table entries past a slot's blocks point to it, so that padded reads get finite zeros."""


class BlockTables:
    """The free and idle blocks, and a row of block ids per slot.

    ``blocks`` is the number of blocks that can be allocated; the cache has one more, the null block.
    """

    def __init__(self, slots: int, blocks: int, block_size: int, max_model_len: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.table = np.full((slots, -(-max_model_len // block_size)), NULL_BLOCK, np.int32)
        """int32[slots, blocks per slot]"""
        self.block_counts = np.zeros(slots, np.int32)
        """Blocks in each slot's row."""
        self.ref_counts = np.zeros(blocks + 1, np.int32)
        """Rows that refer to each block."""
        self._free = np.arange(blocks, 0, -1, dtype=np.int32)
        self._free_count = blocks
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Cached blocks without references, the longest idle first."""
        self._is_cached = np.zeros(blocks + 1, np.bool_)
        """Blocks with a digest."""
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def free_count(self) -> int:
        """Blocks that can be allocated: free and idle ones."""
        return self._free_count + len(self._idle)

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
        if total > self.free_count():
            raise ValueError(f"{total} KV blocks wanted, {self.free_count()} are free")
        if total > self._free_count:
            self._evict(total - self._free_count)
        taken = self._free[self._free_count - total : self._free_count][::-1]
        self._free_count -= total
        self.ref_counts[taken] = 1
        ends = np.cumsum(counts)
        within = np.arange(total) - np.repeat(ends - counts, counts)
        self.table[np.repeat(slots, counts), np.repeat(self.block_counts[slots], counts) + within] = taken
        self.block_counts[slots] += counts

    def share(self, slot: int, blocks: Sequence[int]) -> None:
        """Make cached blocks the first blocks of a slot that has none."""
        for block in blocks:
            if not self.ref_counts[block]:
                del self._idle[block]
        self.table[slot, : len(blocks)] = blocks
        self.ref_counts[self.table[slot, : len(blocks)]] += 1
        self.block_counts[slot] = len(blocks)

    def release(self, slot: int) -> None:
        """Free all blocks of a slot. Cached ones become idle, the last of the slot to be evicted first."""
        row = self.table[slot, : int(self.block_counts[slot])]
        self.ref_counts[row] -= 1
        unused = row[self.ref_counts[row] == 0][::-1]
        kept = self._is_cached[unused]
        self._idle.update(dict.fromkeys(unused[kept].tolist()))
        self._push(unused[~kept])
        row[:] = NULL_BLOCK
        self.block_counts[slot] = 0

    def _push(self, blocks: I32) -> None:
        self._free[self._free_count : self._free_count + len(blocks)] = blocks
        self._free_count += len(blocks)

    # -- cached blocks

    def find_cached(self, digest: bytes) -> int | None:
        """The block cached under ``digest``."""
        return self._block_of.get(digest)

    def idle_among(self, blocks: Sequence[int]) -> int:
        """How many of ``blocks``, all cached, are idle."""
        return int(np.count_nonzero(self.ref_counts[np.array(blocks, np.intp)] == 0))

    def cache_block(self, block: int, digest: bytes) -> None:
        """Cache a full block in use under ``digest``, unless another block has the digest already."""
        if digest not in self._block_of and not self._is_cached[block]:
            self._block_of[digest] = block
            self._digest_of[block] = digest
            self._is_cached[block] = True

    def reset_cache(self) -> None:
        """Forget all digests and free the idle blocks."""
        self._push(np.fromiter(self._idle, np.int32, len(self._idle)))
        self._idle.clear()
        self._block_of.clear()
        self._digest_of.clear()
        self._is_cached[:] = False

    def _evict(self, count: int) -> None:
        """Free the ``count`` least recently used idle blocks."""
        emptied = np.empty(count, np.int32)
        for index in range(count):
            block, _ = self._idle.popitem(last=False)
            del self._block_of[self._digest_of.pop(block)]
            emptied[index] = block
        self._is_cached[emptied] = False
        self._push(emptied)

    # -- token addresses

    def cache_rows(self, slots: NDArray[np.intp], positions: NDArray[np.intp]) -> NDArray[np.int64]:
        """int64[n]: index in the flat cache of the token at each (slot, history position)."""
        blocks = self.table[slots, positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size
