"""Which prompt prefixes were sent to which endpoints lately, and may be in their prefix caches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from penstock.gateway.routing.endpoint import Endpoint

BLOCK_BYTES = 256
"""Bytes of prompt text per block, about 64 tokens of English."""
MOST_BLOCKS = 128
"""Blocks compared per prompt, 32 KiB of text: longer matches make no difference to the choice."""
MOST_INDEXED = 1 << 17
"""Blocks of all prompts that are remembered."""


def prefix_blocks(model: str, prompt: bytes) -> list[int]:
    """Hashes of the prompt's complete blocks; each hash includes all the text before its block.

    These are Python's hashes: 64 bits, stable within one process. After a collision a pick is no better than
    without affinity.
    """
    latest = hash(model)
    hashes = []
    for start in range(0, min(len(prompt), MOST_BLOCKS * BLOCK_BYTES) - BLOCK_BYTES + 1, BLOCK_BYTES):
        latest = hash((latest, prompt[start : start + BLOCK_BYTES]))
        hashes.append(latest)
    return hashes


class PrefixIndex:
    """Maps block hashes to the set of endpoints that were sent the block, as bits. Least recently used blocks
    are evicted."""

    def __init__(self, most_blocks: int = MOST_INDEXED) -> None:
        self._most_blocks = most_blocks
        self._bits: OrderedDict[int, int] = OrderedDict()
        self._number: dict[Endpoint, int] = {}
        """Bit of each endpoint; reused after :meth:`forget`."""
        self._free: list[int] = []

    def matched(self, blocks: Sequence[int], endpoints: Sequence[Endpoint]) -> list[int]:
        """Length of the longest known prefix, in blocks, for each endpoint."""
        numbers = [self._number.get(endpoint, -1) for endpoint in endpoints]
        lengths = dict.fromkeys(numbers, 0)
        alive = 0
        for number in numbers:
            if number >= 0:
                alive |= 1 << number
        for length, block in enumerate(blocks):
            still = alive & self._bits.get(block, 0)
            if still != alive:
                _assign(lengths, alive & ~still, length)
                alive = still
            if not alive:
                break
        _assign(lengths, alive, len(blocks))
        return [lengths[number] for number in numbers]

    def note(self, blocks: Sequence[int], endpoint: Endpoint) -> None:
        """Record that the endpoint is sent a prompt with these blocks."""
        bit = 1 << self._number_of(endpoint)
        for block in blocks:
            self._bits[block] = self._bits.pop(block, 0) | bit
        while len(self._bits) > self._most_blocks:
            self._bits.popitem(last=False)

    def forget(self, endpoint: Endpoint) -> None:
        """Remove an endpoint: it left the pool, or lost its cache."""
        number = self._number.pop(endpoint, None)
        if number is None:
            return
        keep = ~(1 << number)
        for block in self._bits:
            self._bits[block] &= keep
        self._free.append(number)

    def _number_of(self, endpoint: Endpoint) -> int:
        number = self._number.get(endpoint)
        if number is None:
            number = self._number[endpoint] = self._free.pop() if self._free else len(self._number)
        return number


def _assign(lengths: dict[int, int], bits: int, length: int) -> None:
    while bits:
        number = (bits & -bits).bit_length() - 1
        lengths[number] = length
        bits &= bits - 1
