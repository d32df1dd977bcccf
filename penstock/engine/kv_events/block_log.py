"""Records what a prefix cache gains and loses, as KV cache events.

A block's hash covers its tokens and all before them, adapter, cache salt and pictures included, so equal
histories have equal hashes on every server. It is kept by the block's place in the cache, for the event of
its removal.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from penstock.engine.schedule.block_tables import NULL_BLOCK
from penstock.engine.schedule.cache_scope import CacheScope
from penstock.wire.arrays import I32
from penstock.wire.kv_events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent

HASH_BYTES = 8
"""As vLLM publishes them: 64 bits, as an integer."""


def block_hashes(
    parent: int | None,
    tokens: bytes,
    block_bytes: int,
    scope: CacheScope,
    pictures: Sequence[Sequence[Any]] = (),
) -> list[int]:
    """Hashes of consecutive full blocks after the block ``parent``; None: they begin a history. ``pictures``:
    those in each block; empty: none has any."""
    latest = scope.seed(HASH_BYTES) if parent is None else parent.to_bytes(HASH_BYTES, "big")
    hashes = []
    for index, start in enumerate(range(0, len(tokens), block_bytes)):
        covered = latest + tokens[start : start + block_bytes]
        if pictures and pictures[index]:
            covered += repr(pictures[index]).encode()
        latest = blake2b(covered, digest_size=HASH_BYTES).digest()
        hashes.append(int.from_bytes(latest, "big"))
    return hashes


class BlockLog:
    """The events of one cache since they were last taken."""

    def __init__(self, blocks: int, block_size: int) -> None:
        """``blocks``: in the cache, without the null block; ``block_size``: tokens of each."""
        self._block_size = block_size
        self._hashes = np.zeros(blocks + 1, np.uint64)
        """Hash of each block while it is cached."""
        self._events: list[KVCacheEvent] = []

    def stored(
        self,
        blocks: I32,
        tokens: bytes,
        before: int,
        scope: CacheScope,
        pictures: Sequence[Sequence[Any]] = (),
    ) -> None:
        """Blocks with these int32 tokens are cached, after the block ``before``, or after none
        (:data:`NULL_BLOCK`). ``scope``: of their history; ``pictures``: those in each block."""
        parent = None if before == NULL_BLOCK else int(self._hashes[before])
        hashes = block_hashes(parent, tokens, 4 * self._block_size, scope, pictures)
        self._hashes[blocks] = hashes
        self._events.append(
            BlockStored(
                block_hashes=[*hashes],
                parent_block_hash=parent,
                token_ids=np.frombuffer(tokens, np.int32).tolist(),
                block_size=self._block_size,
                lora_id=None,
                medium=MEDIUM_GPU,
                lora_name=None if scope.adapter is None else scope.adapter[0],
                extra_keys=scope.extra_keys(len(hashes), first=parent is None, pictures=pictures),
            )
        )

    def removed(self, blocks: I32) -> None:
        """Blocks are no longer cached."""
        self._events.append(BlockRemoved([*self._hashes[blocks].tolist()], MEDIUM_GPU))

    def cleared(self) -> None:
        """No block is cached any more."""
        self._events.append(AllBlocksCleared())

    def take_events(self) -> list[KVCacheEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events
