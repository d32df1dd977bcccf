"""What subscribers know of a cache by its events is what the cache has."""

from __future__ import annotations

import random

import numpy as np
import pytest

from penstock.engine.kv_events.block_log import BlockLog, block_hashes
from penstock.engine.schedule.block_tables import NULL_BLOCK
from penstock.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from tests.engine.paged import Driver, make_scheduler

BLOCK = 4


class Follower:
    """A subscriber: the cached blocks, by hash, each with the tokens of its whole history."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[str | None, bytes]] = {}

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
        salt = event.extra_keys[0][0] if event.extra_keys and event.extra_keys[0] else None
        history = b""
        if event.parent_block_hash is not None:
            salt, history = self.blocks[event.parent_block_hash]  # a KeyError: it follows nothing known
        for index, hash in enumerate(event.block_hashes):
            assert hash not in self.blocks
            history += np.array(event.token_ids[index * BLOCK : (index + 1) * BLOCK], np.int32).tobytes()
            self.blocks[hash] = salt, history


def cached_blocks(driver: Driver) -> set[tuple[str | None, bytes]]:
    """The computed blocks in the tree of a prefix cache."""
    found = set()
    cache = driver.scheduler.prefix_cache
    waiting = [(root, b"", salt) for salt, root in cache._roots.items()]
    while waiting:
        run, before, salt = waiting.pop()
        size = 4 * BLOCK
        for block in range(run.computed):
            found.add((salt, before + run.tokens[: (block + 1) * size]))
        waiting += [(child, before + run.tokens, salt) for child in run.children.values()]
    return found


@pytest.mark.parametrize("seed", range(8))
def test_a_subscriber_knows_what_is_cached(seed: int) -> None:
    rng = random.Random(seed)
    log = BlockLog(20, BLOCK)
    driver = Driver(make_scheduler(4, 20, block_size=BLOCK, max_num_batched_tokens=16, block_log=log))
    follower = Follower()
    stories = [[rng.randrange(50) for _ in range(40)] for _ in range(3)]
    for stream in range(40):
        story = rng.choice(stories)
        prompt = story[: rng.randrange(1, 36)] + [rng.randrange(50) for _ in range(rng.randrange(4))]
        driver.submit(stream, prompt, rng.randrange(1, 20), salt=rng.choice([None, None, "a"]))
        for _ in range(rng.randrange(8)):
            driver.step()
            follower.take(log.take())
            assert set(follower.blocks.values()) == cached_blocks(driver)
        if rng.random() < 0.1:
            driver.scheduler.abort(0, [stream])
        if rng.random() < 0.05:
            driver.scheduler.prefix_cache.reset()
            follower.take(log.take())
            assert not follower.blocks
    driver.finish()
    follower.take(log.take())
    assert set(follower.blocks.values()) == cached_blocks(driver)


def test_hashes_cover_everything_before_a_block() -> None:
    first, second = np.arange(4, dtype=np.int32).tobytes(), np.arange(4, 8, dtype=np.int32).tobytes()
    whole = block_hashes(None, first + second, 16, None)
    assert whole == [*block_hashes(None, first, 16, None), *block_hashes(whole[0], second, 16, None)]
    assert block_hashes(None, second, 16, None) != whole[1:]
    assert set(block_hashes(None, first + second, 16, "salt")).isdisjoint(whole)


def test_the_salt_stands_at_the_first_block_alone() -> None:
    log = BlockLog(4, 2)
    log.stored(np.array([1, 2], np.int32), np.arange(4, dtype=np.int32).tobytes(), NULL_BLOCK, "s")
    log.stored(np.array([3], np.int32), np.arange(2, dtype=np.int32).tobytes(), 2, "s")
    first, second = log.take()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert first.extra_keys == [["s"], None]
    assert second.extra_keys is None
    assert second.parent_block_hash == first.block_hashes[1]
