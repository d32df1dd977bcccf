"""Prefix caching: full KV blocks are hashed, and streams with a common prefix share them.

The digest of a full block covers its tokens and, through the previous block's digest, the whole history
before it. A chain of digests begins with one of the request's ``cache_salt``, so streams with different salts
share nothing. Only full blocks are shared, and never the block with the last token of a history: that token
is computed for its logits, so shared blocks are never written.

Blocks that a stream is about to compute are *promised*: other streams wait for them instead of computing them
as well. A promise is fulfilled block by block, or withdrawn when the stream frees its blocks. A stream that
promises blocks has them all allocated, so nobody waits forever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from penstock.engine.batch.slots import SlotTable
from penstock.engine.schedule.block_tables import BlockTables
from penstock.wire.messages import Submit

DIGEST_BYTES = 16
_ROOT = bytes(DIGEST_BYTES)


@dataclass(slots=True)
class BlockHashChain:
    """The digests of a history's full blocks, except one that ends with the history's last token."""

    digest: bytes
    """The last digest; initially that of the salt."""
    reads_cache: bool = True
    """Whether the stream uses cached blocks."""
    digests: list[bytes] = field(default_factory=list)
    awaited: bytes = b""
    """The digest that another stream was computing at the last lookup."""
    num_cached: int = 0
    """Leading blocks that are cached, so that other streams find them."""

    def extend(self, tokens: bytes, block_size: int) -> None:
        """Hash the full blocks of ``tokens`` (int32), which follow the blocks hashed so far."""
        step = 4 * block_size
        for start in range(0, len(tokens) - step + 1, step):
            block = self.digest + tokens[start : start + step]
            self.digest = blake2b(block, digest_size=DIGEST_BYTES).digest()
            self.digests.append(self.digest)


class PrefixCache:
    """Looks up, promises and caches the blocks of each slot's stream."""

    def __init__(self, table: SlotTable, blocks: BlockTables, *, enabled: bool) -> None:
        self.enabled = enabled
        self.queries = 0
        """Prompt tokens of admitted streams that were looked up."""
        self.hits = 0
        """Those of them that were found cached."""
        self._table = table
        self._blocks = blocks
        self._chains: dict[int, BlockHashChain] = {}
        """By slot."""
        self._promised: dict[bytes, int] = {}
        """Digests of blocks that are being computed, with the slot that computes them."""

    def hash_prompt(self, request: Submit) -> BlockHashChain | None:
        """The chain of a prompt; None when prefix caching is off.

        A request for prompt logprobs does not read the cache: they need all prompt tokens to be computed.
        """
        if not self.enabled:
            return None
        salt = request.cache_salt
        root = _ROOT if salt is None else blake2b(salt.encode(), digest_size=DIGEST_BYTES).digest()
        chain = BlockHashChain(root, reads_cache=request.sampling.prompt_logprobs < 0)
        # not the block that the last token fills: a chunk may end before it, and a promise would stay open
        chain.extend(request.prompt[:-4], self._blocks.block_size)
        return chain

    def chain_of_preempted(self, slot: int) -> BlockHashChain | None:
        """The chain of a preempted stream; None when the cache was reset after it began."""
        return self._chains.get(slot)

    def find(self, chain: BlockHashChain | None, length: int) -> list[int] | None:
        """The cached blocks of the longest prefix of a history of ``length`` tokens; None when another stream
        is computing the next block of it."""
        found: list[int] = []
        if chain is None or not chain.reads_cache:
            return found
        if chain.awaited in self._promised:
            return None
        for digest in chain.digests[: (length - 1) // self._blocks.block_size]:
            block = self._blocks.find_cached(digest)
            if block is None:
                if digest in self._promised:
                    chain.awaited = digest
                    return None
                break
            found.append(block)
        return found

    def record_lookup(self, chain: BlockHashChain | None, tokens: int, found: Sequence[int]) -> None:
        """Count a lookup of a prompt of ``tokens`` tokens that found the blocks ``found``."""
        if chain is not None and chain.reads_cache:
            self.queries += tokens
            self.hits += len(found) * self._blocks.block_size

    # -- streams begin, go on and leave

    def attach(self, slot: int, chain: BlockHashChain | None, found: Sequence[int]) -> None:
        """Share the blocks ``found`` with a slot that has none, and promise the rest of its chain."""
        self._blocks.share(slot, found)
        if chain is not None:
            self._chains[slot] = chain
            chain.num_cached = len(found)
            for digest in chain.digests[chain.num_cached :]:
                self._promised.setdefault(digest, slot)

    def mark_computed(self, slot: int, tokens: int) -> None:
        """Cache the full blocks of the first ``tokens`` tokens: they are in the slot's blocks, or will be
        before anyone reads them."""
        chain = self._chains.get(slot)
        if chain is None:
            return
        full = min(tokens // self._blocks.block_size, len(chain.digests))
        for index in range(chain.num_cached, full):
            digest = chain.digests[index]
            self._blocks.cache_block(int(self._blocks.table[slot, index]), digest)
            self._withdraw(slot, digest)
        chain.num_cached = max(chain.num_cached, full)

    def release(self, slot: int, tokens: int, *, forever: bool) -> None:
        """Free the blocks of a slot, in which the first ``tokens`` tokens of its history are computed.

        The output's blocks are cached as well, for the next turn of the conversation, or for the stream's own
        return after preemption (``forever`` False).
        """
        chain = self._chains.pop(slot, None)
        if chain is not None:
            size = self._blocks.block_size
            further = self._table.history[slot, len(chain.digests) * size : tokens]
            chain.extend(further.tobytes(), size)
            self._chains[slot] = chain
            self.mark_computed(slot, tokens)
            for digest in chain.digests[chain.num_cached :]:
                self._withdraw(slot, digest)
            chain.num_cached = 0
            if forever:
                del self._chains[slot]
        self._blocks.release(slot)

    def _withdraw(self, slot: int, digest: bytes) -> None:
        if self._promised.get(digest) == slot:
            del self._promised[digest]

    def reset(self) -> None:
        """Forget all cached blocks. Running streams continue, but their blocks will not be cached."""
        self._blocks.reset_cache()
        self._chains.clear()
        self._promised.clear()
