"""What subscribers know of a cache by its events is what the cache has."""

from __future__ import annotations

import random
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest

from penstock.engine.kv_events.block_log import BlockLog, block_hashes
from penstock.engine.schedule.block_tables import NULL_BLOCK
from penstock.engine.schedule.cache_scope import CacheScope
from penstock.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from tests.engine.paged import Driver, adapter_table, make_scheduler

BLOCK = 4
BASE = CacheScope()
Story = tuple[str | None, str | None, bytes]
"""Salt, adapter and tokens of the history that a block ends."""


class Follower:
    """A subscriber: the cached blocks, by hash, each with the tokens of its whole history."""

    def __init__(self) -> None:
        self.blocks: dict[int, Story] = {}

    def take(self, events: list[KVCacheEvent]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
            elif isinstance(event, BlockRemoved):
                for hash in event.block_hashes:
                    del self.blocks[hash]  # a KeyError: it was never stored
            else:
                self._store(event)

    def _store(self, event: BlockStored) -> None:
        assert event.block_size == BLOCK
        assert len(event.token_ids) == BLOCK * len(event.block_hashes)
        extra_keys = event.extra_keys or [None] * len(event.block_hashes)
        assert len(extra_keys) == len(event.block_hashes)
        salts = [[*(extra or ())] for extra in extra_keys]
        if event.lora_name is not None:
            assert [extra.pop(0) for extra in salts] == [event.lora_name] * len(salts)
        assert not any(salts[1:])
        (salt,) = salts[0] or [None]
        history = b""
        if event.parent_block_hash is not None:
            assert salt is None
            salt, adapter, history = self.blocks[event.parent_block_hash]  # a KeyError: it is not known
            assert adapter == event.lora_name
        for index, hash in enumerate(event.block_hashes):
            assert hash not in self.blocks
            history += np.array(event.token_ids[index * BLOCK : (index + 1) * BLOCK], np.int32).tobytes()
            self.blocks[hash] = salt, event.lora_name, history


def cached_blocks(driver: Driver) -> set[Story]:
    """The computed blocks in the tree of a prefix cache."""
    found = set()
    cache = driver.scheduler.prefix_cache
    waiting = [(root, b"", scope) for scope, root in cache._roots.items()]
    while waiting:
        run, before, scope = waiting.pop()
        assert run.scope == scope
        size = 4 * BLOCK
        for block in range(run.computed):
            name = None if scope.adapter is None else scope.adapter[0]
            found.add((scope.salt, name, before + run.tokens[: (block + 1) * size]))
        waiting += [(child, before + run.tokens, scope) for child in run.children.values()]
    return found


@pytest.mark.parametrize("seed", range(8))
def test_a_subscriber_knows_what_is_cached(seed: int) -> None:
    rng = random.Random(seed)
    log = BlockLog(20, BLOCK)
    options: dict[str, Any] = {
        "block_size": BLOCK,
        "max_num_batched_tokens": 16,
        "block_log": log,
        "max_loras": 2,
    }
    driver = Driver(make_scheduler(4, 20, adapters=adapter_table("a", "b", "c"), **options))
    follower = Follower()
    stories = [[rng.randrange(50) for _ in range(40)] for _ in range(3)]
    for stream in range(40):
        story = rng.choice(stories)
        prompt = story[: rng.randrange(1, 36)] + [rng.randrange(50) for _ in range(rng.randrange(4))]
        driver.submit(
            stream,
            prompt,
            rng.randrange(1, 20),
            salt=rng.choice([None, None, "a"]),
            adapter=rng.choice([None, None, "a", "b", "c"]),
        )
        for _ in range(rng.randrange(8)):
            driver.step()
            follower.take(log.take_events())
            assert set(follower.blocks.values()) == cached_blocks(driver)
        if rng.random() < 0.1:
            driver.scheduler.abort(0, [stream])
        if rng.random() < 0.05:
            driver.scheduler.prefix_cache.reset()
            follower.take(log.take_events())
            assert not follower.blocks
    driver.finish()
    follower.take(log.take_events())
    assert set(follower.blocks.values()) == cached_blocks(driver)


def test_hashes_cover_everything_before_a_block() -> None:
    first, second = np.arange(4, dtype=np.int32).tobytes(), np.arange(4, 8, dtype=np.int32).tobytes()
    whole = block_hashes(None, first + second, 16, BASE)
    assert whole == [*block_hashes(None, first, 16, BASE), *block_hashes(whole[0], second, 16, BASE)]
    assert block_hashes(None, second, 16, BASE) != whole[1:]
    assert set(block_hashes(None, first + second, 16, CacheScope("salt"))).isdisjoint(whole)


def test_the_salt_stands_at_the_first_block_alone() -> None:
    log = BlockLog(4, 2)
    log.stored(
        np.array([1, 2], np.int32), np.arange(4, dtype=np.int32).tobytes(), NULL_BLOCK, CacheScope("s")
    )
    log.stored(np.array([3], np.int32), np.arange(2, dtype=np.int32).tobytes(), 2, CacheScope("s"))
    first, second = log.take_events()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert first.extra_keys == [["s"], None]
    assert second.extra_keys is None
    assert second.parent_block_hash == first.block_hashes[1]


def test_an_adapter_s_name_stands_at_every_block_and_the_salt_behind_it() -> None:
    log = BlockLog(4, 2)
    scope = CacheScope("s", ("sql", "digest"))
    log.stored(np.array([1, 2], np.int32), np.arange(4, dtype=np.int32).tobytes(), NULL_BLOCK, scope)
    log.stored(np.array([3], np.int32), np.arange(2, dtype=np.int32).tobytes(), 2, scope)
    first, second = log.take_events()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (first.lora_name, first.extra_keys) == ("sql", [["sql", "s"], ["sql"]])
    assert (second.lora_name, second.extra_keys) == ("sql", [["sql"]])


def test_hashes_tell_adapters_their_versions_and_salts_apart() -> None:
    scopes = [
        BASE,
        CacheScope("a"),
        CacheScope("s"),
        CacheScope(None, ("a", "1")),
        CacheScope(None, ("a", "2")),
        CacheScope(None, ("b", "1")),
        CacheScope("s", ("a", "1")),
        CacheScope("1", ("a", "1")),
        CacheScope("", ("a", "1")),
    ]
    tokens = np.arange(4, dtype=np.int32).tobytes()
    assert len({block_hashes(None, tokens, 16, scope)[0] for scope in scopes}) == len(scopes)


def test_hashes_of_the_base_model_do_not_change() -> None:
    """Other versions of Penstock, and indexes that were built before, know blocks by them."""
    tokens = np.arange(4, dtype=np.int32).tobytes()
    salted = blake2b(b"s", digest_size=8).digest()
    expected = [blake2b(seed + tokens, digest_size=8).digest() for seed in (b"", salted)]
    found = [block_hashes(None, tokens, 16, scope)[0] for scope in (BASE, CacheScope("s"))]
    assert found == [int.from_bytes(digest, "big") for digest in expected]
