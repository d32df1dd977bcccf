"""Prefix caching: full KV blocks are hashed, and streams with a common prefix share them.

The digest of a full block covers its tokens and, through the previous block's digest, the whole history
before it. A chain of digests begins with one of the request's ``cache_salt``, so streams with different salts
share nothing. Only full blocks are shared, and never the block with the last token of a history: that token
is computed for its logits, so shared blocks are never written.

Blocks that a stream is about to compute are *promised*: other streams wait for them instead of computing them
as well. A promise is fulfilled block by block, or withdrawn when the stream frees its blocks: it is *settled*
either way. A stream that promises blocks has them all allocated, so nobody waits forever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile

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
    digests: Sequence[bytes] = ()
    """Chains of equal prompts share them."""
    awaited: bytes = b""
    """After a lookup that found the next block promised: the last block that is promised with it."""
    num_cached: int = 0
    """Leading blocks that are cached, so that other streams find them."""

    def extend(self, tokens: bytes, block_size: int) -> None:
        """Hash the full blocks of ``tokens`` (int32), which follow the blocks hashed so far."""
        step = 4 * block_size
        further = []
        for start in range(0, len(tokens) - step + 1, step):
            block = self.digest + tokens[start : start + step]
            self.digest = blake2b(block, digest_size=DIGEST_BYTES).digest()
            further.append(self.digest)
        if further:
            self.digests = (*self.digests, *further)


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
        self._awaited: set[bytes] = set()
        """Those of them that lookups have named."""
        self._settled: list[bytes] = []
        self._last_hashed: tuple[bytes, bytes, BlockHashChain] | None = None
        """Prompt, root and chain of the last prompt: the choices of a request have the same."""

    def hash_prompt(self, request: Submit) -> BlockHashChain | None:
        """The chain of a prompt; None when prefix caching is off.

        A request for prompt logprobs does not read the cache: they need all prompt tokens to be computed.
        """
        if not self.enabled:
            return None
        salt = request.cache_salt
        root = _ROOT if salt is None else blake2b(salt.encode(), digest_size=DIGEST_BYTES).digest()
        if self._last_hashed is None or self._last_hashed[:2] != (request.prompt, root):
            hashed = BlockHashChain(root)
            # not the block that the last token fills: a chunk may end before it, and a promise stay open
            hashed.extend(request.prompt[:-4], self._blocks.block_size)
            self._last_hashed = request.prompt, root, hashed
        hashed = self._last_hashed[2]
        return BlockHashChain(hashed.digest, request.sampling.prompt_logprobs < 0, hashed.digests)

    def chain_of_preempted(self, slot: int) -> BlockHashChain | None:
        """The chain of a preempted stream; None when the cache was reset after it began."""
        return self._chains.get(slot)

    def find(self, chain: BlockHashChain | None, length: int) -> list[int] | None:
        """The cached blocks of the longest prefix of a history of ``length`` tokens; None when another stream
        is computing the next block of it, and ``chain.awaited`` is worth waiting for."""
        found: list[int] = []
        if chain is None or not chain.reads_cache:
            return found
        if chain.awaited in self._promised:
            self._awaited.add(chain.awaited)  # it may have been settled and promised again since
            return None
        digests = chain.digests[: (length - 1) // self._blocks.block_size]
        for digest in digests:
            block = self._blocks.find_cached(digest)
            if block is None:
                break
            found.append(block)
        promised = list(takewhile(self._promised.__contains__, digests[len(found) :]))
        if not promised:
            return found
        chain.awaited = promised[-1]
        self._awaited.add(chain.awaited)
        return None

    def take_settled(self) -> Sequence[bytes]:
        """The awaited digests whose promise has been fulfilled or withdrawn since the last call."""
        if not self._settled:
            return ()
        settled, self._settled = self._settled, []
        return settled

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
            if digest in self._awaited:
                self._awaited.remove(digest)
                self._settled.append(digest)

    def reset(self) -> None:
        """Forget all cached blocks. Running streams continue, but their blocks will not be cached."""
        self._blocks.reset_cache()
        self._chains.clear()
        self._promised.clear()
        self._settled += self._awaited
        self._awaited.clear()
