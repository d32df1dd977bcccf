"""Which prompt prefixes were sent to which endpoints lately, and may be in their prefix caches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.endpoint_columns import EndpointColumns, Floats
from penstock.gateway.routing.rendezvous import stable_hash

BLOCK_BYTES = 256
"""Bytes of the first blocks of a prompt's text, about 64 tokens of English."""
EVEN_BYTES = 8 << 10
"""Bytes from which on blocks grow, to 1/GROWTH of what precedes them. The histories of agents are long, and
begin alike for longer than a fixed number of small blocks could tell apart."""
GROWTH = 32
MAX_BYTES = 2 << 20
"""Bytes compared per prompt, half a million tokens."""
MAX_INDEXED = 1 << 18
"""Blocks of all prompts that are remembered."""
FEW_BITS = 8
"""Bits that are visited one by one."""


def _block_ends() -> list[int]:
    ends, end = [], 0
    while end < MAX_BYTES:
        size = BLOCK_BYTES if end < EVEN_BYTES else end // GROWTH // BLOCK_BYTES * BLOCK_BYTES
        end += size
        ends.append(end)
    return ends


BLOCK_ENDS = _block_ends()
"""Where the blocks of a prompt end, in bytes."""
_BYTES = np.array([0, *BLOCK_ENDS], np.float64)
"""Bytes of so many blocks."""


def prefix_blocks(model: str, prompt: bytes) -> list[int]:
    """Hashes of the prompt's complete blocks; each hash includes all the text before its block.

    The first one is the same in every gateway, for :mod:`~penstock.gateway.routing.rendezvous`. The others
    are Python's hashes: 64 bits, stable among the workers of a gateway. After a collision a pick is no better
    than without affinity.
    """
    size = len(prompt)
    if size < BLOCK_BYTES:
        return []
    start = BLOCK_BYTES
    latest = stable_hash(model.encode(errors="replace") + b"\0" + prompt[:start])
    hashes = [latest]
    for end in BLOCK_ENDS[1:]:
        if end > size:
            break
        latest = hash((latest, prompt[start:end]))
        hashes.append(latest)
        start = end
    return hashes


class PrefixIndex:
    """Maps block hashes to the endpoints that were sent the block, as bits by their rows. Least recently used
    blocks are evicted."""

    def __init__(self, columns: EndpointColumns, most_blocks: int = MAX_INDEXED) -> None:
        self._columns = columns
        self._most_blocks = most_blocks
        self._bits: OrderedDict[int, int] = OrderedDict()

    def matched(self, blocks: Sequence[int], endpoints: Sequence[Endpoint]) -> list[int]:
        """Length of the longest known prefix, in blocks, for each endpoint."""
        rows = [self._columns.find_row(endpoint) for endpoint in endpoints]
        lengths = self.lengths(blocks)
        return [0 if row < 0 else int(lengths[row]) for row in rows]

    def lengths(self, blocks: Sequence[int]) -> Floats:
        """Length of the longest known prefix, in blocks, by row."""
        lengths = np.zeros(self._columns.size)
        alive = self._bits.get(blocks[0], 0) if blocks else 0
        for length, block in enumerate(blocks):
            if not alive:
                return lengths
            still = alive & self._bits.get(block, 0)
            if still != alive:
                _assign(lengths, alive & ~still, length)
                alive = still
        _assign(lengths, alive, len(blocks))
        return lengths

    def shares(self, blocks: Sequence[int]) -> Floats:
        """Share of the blocks' bytes in the longest known prefix, by row."""
        shares: Floats = _BYTES[self.lengths(blocks).astype(np.intp)] / _BYTES[len(blocks)]
        return shares

    def note(self, blocks: Sequence[int], endpoint: Endpoint) -> None:
        """Record that the endpoint is sent a prompt with these blocks."""
        bit = 1 << self._columns.row(endpoint)
        for block in blocks:
            self._bits[block] = self._bits.pop(block, 0) | bit
        while len(self._bits) > self._most_blocks:
            self._bits.popitem(last=False)

    def forget(self, endpoint: Endpoint) -> None:
        """Remove an endpoint: it left the pool, or lost its cache."""
        row = self._columns.find_row(endpoint)
        if row < 0:
            return
        bit = 1 << row
        # The items as a dict has them: in the order of use they take ten times as long, up to 0.1 s.
        for block in [block for block, bits in dict.items(self._bits) if bits & bit]:
            self._bits[block] ^= bit


def _assign(lengths: Floats, bits: int, length: int) -> None:
    if bits.bit_count() <= FEW_BITS:
        while bits:
            lengths[(bits & -bits).bit_length() - 1] = length
            bits &= bits - 1
        return
    packed = np.frombuffer(bits.to_bytes(-(-len(lengths) // 8), "little"), np.uint8)
    lengths[np.unpackbits(packed, count=len(lengths), bitorder="little").view(np.bool_)] = length
