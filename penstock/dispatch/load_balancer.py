"""Picks the engine of a stream: the least loaded one, or the one whose prefix cache likely has its prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_BYTES = 1024
"""Prompt bytes per block, which is 256 tokens: shorter common prefixes are not worth a higher load."""
MAX_BLOCKS = 32
"""Blocks of a prompt that have a key each. Longer prefixes have one at every eighth of their length, so that
conversations with the same long system prompt are told apart: 53 keys for 100,000 tokens. Of such an eighth
the last block counts, so a key takes half a microsecond; a wrong guess costs cached tokens only."""
MAX_BYTES = 1 << 22
"""Maximum prompt bytes that count."""
MAX_KEYS = 1 << 16
"""Maximum affinity keys kept; the least recently used one is dropped first."""
AFFINITY_FACTOR, AFFINITY_SLACK = 1.5, 4
"""Affinity applies only to an engine with at most FACTOR times the streams of the least loaded one, plus
SLACK."""


def affinity_keys(
    prompt: bytes, cache_salt: str | None, session: str | None, adapter: str | None = None
) -> tuple[int, ...]:
    """Keys of what a stream may share with earlier ones, best first: its session, then the prefixes of its
    prompt (int32 token ids), longest first. Streams of different adapters (``adapter``: its digest) share
    nothing. Keys are this process's hashes, however long the session is: no client can make two that are
    equal, and they take a quarter of a digest's time."""
    keys = []
    digest = scope = hash((cache_salt or "", adapter))
    blocks = 0
    most = min(len(prompt), MAX_BYTES) // BLOCK_BYTES
    while (blocks := blocks + (1 if blocks < MAX_BLOCKS else blocks // 8)) <= most:
        end = blocks * BLOCK_BYTES
        digest = hash((digest, prompt[end - BLOCK_BYTES : end]))
        keys.append(digest)
    if session is not None:
        keys.append(hash((scope, session)))
    return tuple(reversed(keys))


class LoadBalancer:
    """One API server's choices among ``ranks`` engines.

    Engines with equal loads take turns, beginning with ``first``. That differs per API server, so that the
    first requests of many API servers do not all go to one engine.
    """

    def __init__(self, ranks: int, first: int) -> None:
        self._ranks = ranks
        self._next = first % ranks
        self._known: OrderedDict[int, int] = OrderedDict()
        """Per affinity key, the rank chosen last."""
        self._keys: tuple[int, ...] = ()
        self._keys_of: tuple[bytes, str | None, str | None, str | None] = b"", None, None, None
        """What ``_keys`` are of."""

    def keys_of(
        self, prompt: bytes, cache_salt: str | None, session: str | None, adapter: str | None
    ) -> tuple[int, ...]:
        """:func:`affinity_keys`, for which the choices of a request ask one after the other."""
        known = self._keys_of
        if prompt is not known[0] or (cache_salt, session, adapter) != known[1:]:
            self._keys_of = prompt, cache_salt, session, adapter
            self._keys = affinity_keys(*self._keys_of)
        return self._keys

    def choose(self, loads: Sequence[int | None], keys: Sequence[int] = ()) -> int | None:
        """The chosen engine's rank, or None. ``loads``: streams per rank, None for an engine that accepts no
        streams."""
        up = [load for load in loads if load is not None]
        if not up:
            return None
        least = min(up)
        rank = self._by_affinity(loads, keys, AFFINITY_FACTOR * least + AFFINITY_SLACK)
        if rank is None:
            rank = self._least_loaded(loads, least)
        for key in keys:
            self._known[key] = rank
            self._known.move_to_end(key)
        while len(self._known) > MAX_KEYS:
            self._known.popitem(last=False)
        return rank

    def _by_affinity(self, loads: Sequence[int | None], keys: Sequence[int], most: float) -> int | None:
        for key in keys:
            rank = self._known.get(key)
            if rank is not None:
                load = loads[rank]
                return rank if load is not None and load <= most else None
        return None

    def _least_loaded(self, loads: Sequence[int | None], least: int) -> int:
        for turn in range(self._ranks):
            rank = (self._next + turn) % self._ranks
            if loads[rank] == least:
                self._next = rank + 1
                return rank
        raise AssertionError("no engine has the least load")
