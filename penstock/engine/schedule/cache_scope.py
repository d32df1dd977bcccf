"""What two histories must have in common, beside their tokens, to share KV blocks."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from penstock.wire.messages import AdapterKey


class CacheScope(NamedTuple):
    """The cache salt of a request, and its adapter: another digest is another adapter."""

    salt: str | None = None
    adapter: AdapterKey | None = None
    """None: the base model."""

    def seed(self, size: int) -> bytes:
        """What the hash of a history's first block covers before its tokens; of ``size`` bytes, or empty.

        The hash of an adapter's seed is personalised, so that no salt has the same seed.
        """
        if self.adapter is not None:
            covered = msgspec.msgpack.encode((self.salt, *self.adapter))
            return blake2b(covered, digest_size=size, person=b"adapter").digest()
        return b"" if self.salt is None else blake2b(self.salt.encode(), digest_size=size).digest()

    def extra_keys(
        self, blocks: int, *, first: bool, pictures: Sequence[Sequence[Any]] = ()
    ) -> list[list[Any] | None] | None:
        """What the hashes of consecutive blocks cover beside tokens, as vLLM's events tell it: the adapter's
        name for each block, its ``pictures``, and the salt for the first one of a history. ``first``: it is
        among them. None: nothing."""
        salt = [self.salt] if first and self.salt is not None else []
        if self.adapter is None and not pictures:
            return [salt, *[None] * (blocks - 1)] if salt else None
        name = [] if self.adapter is None else [self.adapter[0]]
        keys: list[list[Any]] = [[*name, *each] for each in pictures or [()] * blocks]
        keys[0] += salt
        return [each or None for each in keys]


UNSCOPED = CacheScope()
"""The scope of requests of the base model without a salt."""
