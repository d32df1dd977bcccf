"""Which blocks each endpoint has in its KV cache, by its events.

Servers hash their blocks as they like, so blocks are known here by keys of the gateway's own: each is
Python's hash of the key before, the block's tokens, and what else its contents depend on. A request's keys
follow from its tokens.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from penstock.gateway.routing.endpoint import Endpoint
from penstock.wire.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVCacheEvent

MAX_BLOCKS = 1 << 20
"""Blocks of all endpoints together, at about 200 bytes each."""
MAX_CHANCES = 8
"""Blocks that are spared, because a prompt has matched them, for each one that is forgotten to make room."""
CANDIDATES = 1024
"""Blocks that are looked up at once to be forgotten: to find the oldest takes time in a large dict whose
oldest entries have gone."""
EXPECTED_S = 10.0
"""Time after which a request that was sent must have shown in events: until then its blocks count as
cached."""
MAX_EXPECTED = 1 << 17
"""Blocks that are expected."""
MAX_ADAPTERS = 1 << 12
"""Adapters that are remembered."""
_MAIN_TIER = ("GPU", None)
"""Media whose blocks count. Blocks on other tiers are announced beside them."""
_MAIN_GROUP = (0, None)
"""Models with several kinds of layers have a group of blocks for each; prefixes are those of the first."""


@dataclass(slots=True, eq=False)
class Source:
    """One rank of an endpoint. It has a KV cache of its own."""

    endpoint: Endpoint
    rank: int = 0
    bit: int = 0
    """Bit of the source in the index, another one after each clearing; 0: the source has no blocks."""
    keys: dict[BlockHash, int] = field(default_factory=dict)
    """Keys by the server's hashes, the oldest first; those that were spared count as stored again."""
    followed: bool = False
    """What it has is known, if not all of it."""

    @property
    def mark(self) -> int:
        """The bit next to its own: of blocks that a prompt has matched here since they were stored, or were
        spared."""
        return self.bit << 1


class BlockIndex:
    """Follows the events of all sources."""

    def __init__(self, most_blocks: int = MAX_BLOCKS) -> None:
        self.size = 0
        """Blocks of all sources."""
        self._most_blocks = most_blocks
        self._bits: dict[int, int] = {}
        """The sources that have a block, as bits, by its key; beside each bit is its mark."""
        self._sources: dict[Endpoint, list[Source]] = {}
        """Sources that are followed, or were, and what is expected of the endpoint."""
        self._owners: dict[int, Endpoint] = {}
        """Endpoints by bit."""
        self._block_sizes: dict[Endpoint, int] = {}
        """Tokens per block of the endpoints that are followed; 0: unknown, as the cache was always empty."""
        self._adapters: set[int] = set()
        """Keys that the histories of adapters begin with."""
        self._cleared: list[tuple[int, dict[BlockHash, int]]] = []
        """Bits that are nobody's, with the blocks that still have them; the latest are swept first, so that
        bits stay few."""
        self._free_bits: list[int] = []
        self._used_bits = 0
        self._candidates: deque[tuple[Source, BlockHash]] = deque()
        """Blocks to be forgotten next, if they still exist."""
        self._expecting: dict[Endpoint, Source] = {}
        """The blocks that are expected of each endpoint, as if one more rank had them."""
        self._expected: OrderedDict[tuple[Source, int], float] = OrderedDict()
        """When each key was expected last."""

    # -- events

    def follow(self, source: Source) -> None:
        """The events of the source come from now on; its blocks are unknown."""
        self._number(source)
        self.clear(source)
        source.followed = True
        self._block_sizes.setdefault(source.endpoint, 0)

    def lose(self, source: Source) -> None:
        """No events come until further notice."""
        self.clear(source)
        source.followed = False
        if not any(each.followed for each in self._sources.get(source.endpoint, ())):
            self._block_sizes.pop(source.endpoint, None)

    def apply(self, source: Source, events: Iterable[KVCacheEvent]) -> None:
        """Take the events of a source that is followed, in order."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.clear(source)
            elif event.medium not in _MAIN_TIER or event.group_idx not in _MAIN_GROUP:
                continue
            elif isinstance(event, BlockRemoved):
                for hash in event.block_hashes:
                    self._remove(source, hash)
            else:
                self._store(source, event)

    def _store(self, source: Source, event: BlockStored) -> None:
        if event.parent_block_hash is None:
            key = _root(event.lora_name)
            if event.lora_name is not None:
                self._note_adapter(key)
        elif (known := source.keys.get(event.parent_block_hash)) is not None:
            key = known
        else:
            return  # what precedes it is unknown
        size, hashes = event.block_size, event.block_hashes
        if size < 1 or len(event.token_ids) != size * len(hashes):
            return
        try:
            tokens = array("i", event.token_ids).tobytes()
        except OverflowError:
            return
        self._block_sizes[source.endpoint] = size
        extra_keys = event.extra_keys or ()
        for index, hash in enumerate(hashes):
            extra = extra_keys[index] if index < len(extra_keys) else None
            extras = _without_adapter(extra or (), event.lora_name)
            key = _next_key(key, tokens[4 * size * index : 4 * size * (index + 1)], extras)
            self._remove(source, hash)
            source.keys[hash] = key
            self._bits[key] = self._bits.get(key, 0) | source.bit
            self.size += 1
        self._make_room()
        self.sweep(2 * len(hashes))

    def _make_room(self) -> None:
        """Forget the oldest blocks of the source that has most; those that prompts have matched get another
        chance, so that common prefixes stay."""
        chances = MAX_CHANCES * (self.size - self._most_blocks)
        while self.size > self._most_blocks:
            if not self._candidates:
                source = max(self._announced(), key=lambda each: len(each.keys))
                self._candidates.extend((source, hash) for hash in islice(source.keys, CANDIDATES))
            source, hash = self._candidates.popleft()
            key = source.keys.get(hash)
            if key is None:
                continue
            if chances and self._bits[key] & source.mark:
                chances -= 1
                self._bits[key] ^= source.mark
                source.keys[hash] = source.keys.pop(hash)
            else:
                self._remove(source, hash)

    def _announced(self) -> Iterator[Source]:
        """The sources whose blocks events have announced."""
        for endpoint, sources in self._sources.items():
            expecting = self._expecting.get(endpoint)
            yield from (each for each in sources if each is not expecting)

    def _note_adapter(self, root: int) -> None:
        if root not in self._adapters and len(self._adapters) >= MAX_ADAPTERS:
            self._adapters.clear()
        self._adapters.add(root)

    def _remove(self, source: Source, hash: BlockHash) -> None:
        key = source.keys.pop(hash, None)
        if key is not None:
            self.size -= 1
            self._unset(key, source.bit)

    def _unset(self, key: int, bit: int) -> None:
        bits = self._bits.get(key, 0) & ~(bit | bit << 1)
        if bits:
            self._bits[key] = bits
        else:
            self._bits.pop(key, None)

    def clear(self, source: Source) -> None:
        """The source has no blocks, or they are not known."""
        self.size -= len(source.keys)
        self._empty(source)
        if (expecting := self._expecting.get(source.endpoint)) is not None:
            self._empty(expecting)

    def _empty(self, source: Source) -> None:
        """Give it another bit: that takes no time, however many blocks have this one."""
        if source.keys:
            del self._owners[source.bit]
            self._cleared.append((source.bit, source.keys))
            source.keys = {}
            self._give_bit(source)

    def sweep(self, most: int) -> bool:
        """Free the memory of at most so many blocks that were cleared; returns whether there are more."""
        while self._cleared and most > 0:
            bit, keys = self._cleared[-1]
            for _ in range(min(most, len(keys))):
                self._unset(keys.popitem()[1], bit)
                most -= 1
            if not keys:
                self._cleared.pop()
                self._free_bits.append(bit)
        return bool(self._cleared)

    def forget(self, endpoint: Endpoint) -> None:
        """The endpoint has left."""
        self._block_sizes.pop(endpoint, None)
        expecting = self._expecting.pop(endpoint, None)
        for source in self._sources.pop(endpoint, ()):
            if source is not expecting:
                self.size -= len(source.keys)
            self._empty(source)
            self._free_bits.append(source.bit)
            del self._owners[source.bit]
            source.bit, source.followed = 0, False

    def _number(self, source: Source) -> None:
        if not source.bit:
            self._give_bit(source)
            self._sources.setdefault(source.endpoint, []).append(source)

    def _give_bit(self, source: Source) -> None:
        if self._free_bits:
            source.bit = self._free_bits.pop()
        else:
            source.bit = 1 << self._used_bits
            self._used_bits += 2
        self._owners[source.bit] = source.endpoint

    # -- requests

    def is_followed(self, endpoint: Endpoint) -> bool:
        return endpoint in self._block_sizes

    def is_adapter(self, model: str) -> bool:
        """Whether events have named it as one."""
        return _root(model) in self._adapters

    def cached(
        self,
        tokens: bytes,
        endpoints: Sequence[Endpoint],
        now: float,
        *,
        adapter: str | None = None,
        salt: str | None = None,
    ) -> dict[Endpoint, int]:
        """Tokens at the beginning of a prompt (int32) that each endpoint has in its KV cache, for those whose
        cache is followed. ``salt``: the request's ``cache_salt``."""
        self._expire(now)
        by_size: dict[int, list[Endpoint]] = {}
        for endpoint in endpoints:
            if (size := self._block_sizes.get(endpoint)) is not None:
                by_size.setdefault(size, []).append(endpoint)
        found: dict[Endpoint, int] = {}
        for size, alike in by_size.items():
            keys = block_keys(tokens, size, adapter=adapter, salt=salt) if size else iter(())
            for endpoint, blocks in self._matched(keys, alike).items():
                found[endpoint] = blocks * size
        return found

    def _matched(self, keys: Iterator[int], endpoints: Sequence[Endpoint]) -> Mapping[Endpoint, int]:
        """Blocks from the first one on that one source of each endpoint has."""
        matched = dict.fromkeys(endpoints, 0)
        alive = 0
        for endpoint in endpoints:
            for source in self._sources[endpoint]:
                alive |= source.bit
        length = 0
        for key in keys:
            bits = self._bits.get(key, 0)
            still = alive & bits
            if still != alive:
                self._assign(matched, alive & ~still, length)
                alive = still
                if not alive:
                    break
            if (marked := bits | still << 1) != bits:
                self._bits[key] = marked
            length += 1
        self._assign(matched, alive, length)
        return matched

    def _assign(self, matched: dict[Endpoint, int], bits: int, length: int) -> None:
        while bits and length:
            lowest = bits & -bits
            matched[self._owners[lowest]] = length
            bits ^= lowest

    def expect(
        self,
        tokens: bytes,
        endpoint: Endpoint,
        now: float,
        *,
        adapter: str | None = None,
        salt: str | None = None,
    ) -> None:
        """The endpoint is sent this prompt, and will cache it: requests that follow at once may know."""
        if not (size := self._block_sizes.get(endpoint, 0)):
            return
        expecting = self._expecting.get(endpoint)
        if expecting is None:
            expecting = self._expecting[endpoint] = Source(endpoint)
            self._number(expecting)
        for key in block_keys(tokens, size, adapter=adapter, salt=salt):
            expecting.keys[key] = key
            self._bits[key] = self._bits.get(key, 0) | expecting.bit
            self._expected[expecting, key] = now
            self._expected.move_to_end((expecting, key))
        self._expire(now)

    def _expire(self, now: float) -> None:
        while self._expected:
            (source, key), at = next(iter(self._expected.items()))
            if now - at < EXPECTED_S and len(self._expected) <= MAX_EXPECTED:
                return
            self._expected.popitem(last=False)
            if source.keys.pop(key, None) is not None:
                self._unset(key, source.bit)


def block_keys(
    tokens: bytes, block_size: int, *, adapter: str | None = None, salt: str | None = None
) -> Iterator[int]:
    """Keys of a prompt's full blocks, except one with its last token, which is computed in any case."""
    key, size = _root(adapter), 4 * block_size
    for start in range(0, (len(tokens) - 4) // size * size, size):
        extras = (salt,) if salt is not None and not start else ()
        key = _next_key(key, tokens[start : start + size], extras)
        yield key


def _without_adapter(extra: Sequence[Any], adapter: str | None) -> tuple[Any, ...]:
    """What a block's hash covers beside its tokens and its adapter, whose name comes first."""
    named = adapter is not None and len(extra) and extra[0] == adapter
    return tuple(extra[1:] if named else extra)


def _root(adapter: str | None) -> int:
    return hash(("", adapter))


def _next_key(before: int, tokens: bytes, extras: tuple[object, ...]) -> int:
    return hash((before, tokens, repr(extras))) if extras else hash((before, tokens))
