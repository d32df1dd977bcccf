"""Streams whose histories begin alike share the blocks of what they have in common.

The digest of a full block covers its tokens and, through the digest before it, all that comes earlier in the
history; a chain of digests begins with one of the request's ``cache_salt``, so streams with different salts
never meet. Only full blocks are shared, and never the one with the last token of a history: that token is
computed for its logits, so nobody writes into a shared block.

What a stream is going to compute is *promised*, for others to wait for it instead of computing it as well. A
promise is kept block by block, or dropped when the stream gives its blocks back; whoever made one has all
blocks it needs to keep it, so nobody waits for ever.
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
    """The digests of a history's full blocks, but for one that ends with the history's last token."""

    digest: bytes
    """The last one; at first that of the salt."""
    reads_cache: bool = True
    """Whether the stream takes what others have computed."""
    digests: list[bytes] = field(default_factory=list)
    awaited: bytes = b""
    """The digest that another stream was computing at the last look."""
    num_cached: int = 0
    """Blocks, from the first one on, that others can find."""

    def extend(self, tokens: bytes, block_size: int) -> None:
        """Add the digests of the full blocks of ``tokens`` (int32), which follow those that are there."""
        step = 4 * block_size
        for start in range(0, len(tokens) - step + 1, step):
            block = self.digest + tokens[start : start + step]
            self.digest = blake2b(block, digest_size=DIGEST_BYTES).digest()
            self.digests.append(self.digest)


class PrefixCache:
    """What can be found in the blocks, what is promised, and who has what."""

    def __init__(self, table: SlotTable, blocks: BlockTables, *, enabled: bool) -> None:
        self.enabled = enabled
        self.queries = 0
        """Prompt tokens of admitted streams that looked for their prefix."""
        self.hits = 0
        """Those of them that were found."""
        self._table = table
        self._blocks = blocks
        self._chains: dict[int, BlockHashChain] = {}
        """By slot."""
        self._promised: dict[bytes, int] = {}
        """Digests of blocks that are being computed, and by which slot."""

    def hash_prompt(self, request: Submit) -> BlockHashChain | None:
        """The chain of a prompt; None when nothing is shared at all.

        Logprobs of a prompt's tokens come from computing all of them.
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
        """The chain of a stream that was preempted; None when the cache was reset since it began."""
        return self._chains.get(slot)

    def find(self, chain: BlockHashChain | None, length: int) -> list[int] | None:
        """The blocks that hold the beginning of a history of ``length`` tokens; None when another stream is
        computing more of it."""
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
        """Count a newcomer's prompt of ``tokens`` tokens, the first of which lie in the blocks ``found``."""
        if chain is not None and chain.reads_cache:
            self.queries += tokens
            self.hits += len(found) * self._blocks.block_size

    # -- streams begin, go on and leave

    def attach(self, slot: int, chain: BlockHashChain | None, found: Sequence[int]) -> None:
        """A stream without blocks shares those it found, and promises the rest of its chain."""
        self._blocks.share(slot, found)
        if chain is not None:
            self._chains[slot] = chain
            chain.num_cached = len(found)
            for digest in chain.digests[chain.num_cached :]:
                self._promised.setdefault(digest, slot)

    def mark_computed(self, slot: int, tokens: int) -> None:
        """The first ``tokens`` tokens of the stream are in its blocks, or will be before anyone reads them:
        what it promised up to there can be found."""
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
        """The stream gives its blocks back; the first ``tokens`` of its history are in them.

        Its output is kept as well, for the conversation's next turn, or for its own return.
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
        """Forget everything: what runs goes on, but nobody will find what it has computed."""
        self._blocks.reset_cache()
        self._chains.clear()
        self._promised.clear()
