"""What the index says of prompts is what prefix caches find."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.kv_events.block_log import BlockLog
from penstock.engine.lora.adapter_table import adapter_of
from penstock.gateway.kv_events.block_index import EXPECTED_S, MAX_ADAPTERS, BlockIndex, Source
from penstock.gateway.routing.endpoint import Endpoint
from penstock.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, decode_batch
from tests.engine.paged import Driver, adapter_table, make_scheduler

BLOCK = 4
A, B = Endpoint("http://a"), Endpoint("http://b")


def tokens(*ids: int) -> bytes:
    return np.array(ids, np.int32).tobytes()


def follow(index: BlockIndex, endpoint: Endpoint = A, rank: int = 0) -> Source:
    source = Source(endpoint, rank)
    index.follow(source)
    return source


def stored(hashes: list[int], ids: list[int], parent: int | None = None, **fields: object) -> BlockStored:
    event = BlockStored([*hashes], parent, ids, len(ids) // len(hashes), None, "GPU", None)
    for name, value in fields.items():
        setattr(event, name, value)
    return event


def swept(index: BlockIndex) -> dict[int, int]:
    """Its blocks, once the memory of cleared ones is freed."""
    while index.sweep(10):
        pass
    return index._bits


def cached(index: BlockIndex, ids: bytes, endpoint: Endpoint = A, now: float = 0.0, **more: str) -> int:
    return index.cached(ids, [endpoint], now, **more).get(endpoint, 0)  # type: ignore[arg-type]


def test_blocks_with_pictures_are_not_those_of_their_tokens() -> None:
    """Nor those of another picture; text before them is everybody's."""
    index = BlockIndex()
    source, ids = follow(index), [1, 2, 3, 4, 5, 49, 49, 49, 49, 49, 7, 8, 9]
    for number, name in enumerate(("aa", "bb")):
        keys = [None, [[name, 1]], [[name, -3]]]
        index.apply(source, [stored([10 * number + each for each in range(3)], ids[:12], extra_keys=keys)])
    assert index.size == 6
    assert len(swept(index)) == 5
    assert cached(index, tokens(*ids)) == 4


@pytest.mark.parametrize("seed", range(4))
def test_it_knows_what_engines_find(seed: int) -> None:
    rng = random.Random(seed)
    index, engines = BlockIndex(), []
    for endpoint in (A, B):
        log = BlockLog(30, BLOCK)
        adapters = adapter_table("a", "b")
        driver = Driver(make_scheduler(4, 30, block_size=BLOCK, block_log=log, adapters=adapters))
        engines.append((follow(index, endpoint), log, driver))
    stories = [[rng.randrange(50) for _ in range(40)] for _ in range(3)]
    for stream in range(60):
        prompt = [*rng.choice(stories)[: rng.randrange(2, 38)], rng.randrange(50)]
        salt, adapter = rng.choice([None, None, "a"]), rng.choice([None, None, "a", "b"])
        found = index.cached(tokens(*prompt), [A, B], 0.0, salt=salt, adapter=adapter)
        for source, log, driver in engines:
            request = driver.submit(stream, prompt, rng.randrange(1, 8), salt=salt, adapter=adapter)
            loaded = adapter_of(request, driver.scheduler.adapters)
            match = driver.scheduler.prefix_cache.find_prefix(
                driver.scheduler.prefix_cache.prefix_of(request, loaded)
            )
            assert match is not None
            assert found.get(source.endpoint, 0) == match.blocks * BLOCK
            if rng.random() < 0.5:
                driver.finish()
            else:
                driver.scheduler.abort(0, [stream])
                driver.finish()
            index.apply(source, log.take_events())


def test_the_block_with_the_last_token_is_computed_in_any_case() -> None:
    index = BlockIndex()
    index.apply(follow(index), [stored([1, 2], [1, 2, 3, 4])])
    assert cached(index, tokens(1, 2, 3, 4)) == 2
    assert cached(index, tokens(1, 2, 3, 4, 5)) == 4
    assert cached(index, tokens(1)) == 0
    assert cached(index, b"") == 0


def test_ranks_have_caches_of_their_own() -> None:
    index = BlockIndex()
    ranks = [follow(index, A, rank) for rank in range(2)]
    index.apply(ranks[0], [stored([1], [1, 2])])
    index.apply(ranks[1], [stored([1, 2], [1, 2, 3, 4])])
    assert cached(index, tokens(1, 2, 3, 4, 5)) == 4
    index.apply(ranks[1], [BlockRemoved([1], "GPU")])
    assert cached(index, tokens(1, 2, 3, 4, 5)) == 2
    index.apply(ranks[0], [AllBlocksCleared()])
    assert cached(index, tokens(1, 2, 3, 4, 5)) == 0
    assert index.size == 1


def test_adapters_salts_and_pictures_tell_blocks_apart() -> None:
    index = BlockIndex()
    source = follow(index)
    index.apply(
        source,
        [
            stored([1], [1, 2], lora_name="sql", extra_keys=[["sql"]]),
            stored([2], [1, 2], extra_keys=[["salt"]]),
            stored([3], [5, 6], extra_keys=[[["picture", 0]]]),
        ],
    )
    assert cached(index, tokens(1, 2, 3)) == 0
    assert cached(index, tokens(1, 2, 3), adapter="sql") == 2
    assert cached(index, tokens(1, 2, 3), salt="salt") == 2
    assert cached(index, tokens(1, 2, 3), salt="other") == 0
    assert cached(index, tokens(5, 6, 3)) == 0


def test_a_salt_that_is_the_adapter_s_name_counts() -> None:
    index = BlockIndex()
    source = follow(index)
    index.apply(source, [stored([1], [1, 2], lora_name="sql", extra_keys=[["sql", "sql"]])])
    assert cached(index, tokens(1, 2, 3), adapter="sql", salt="sql") == 2
    assert cached(index, tokens(1, 2, 3), adapter="sql") == 0
    assert cached(index, tokens(1, 2, 3), salt="sql") == 0


def test_adapters_that_events_name_are_known_and_bounded() -> None:
    index = BlockIndex()
    source = follow(index)
    for number in range(MAX_ADAPTERS + 10):
        index.apply(source, [stored([number], [1, 2], lora_name=f"a{number}")])
        assert index.is_adapter(f"a{number}")
    assert not index.is_adapter("m")
    assert len(index._adapters) <= MAX_ADAPTERS


def test_other_tiers_and_groups_do_not_count() -> None:
    index = BlockIndex()
    source = follow(index)
    index.apply(source, [stored([1], [1, 2], medium="CPU"), stored([2], [1, 2], group_idx=1)])
    assert index.size == 0
    index.apply(source, [stored([1], [1, 2]), BlockRemoved([1], "CPU"), BlockRemoved([1], None, 1)])
    assert cached(index, tokens(1, 2, 3)) == 2


def test_what_makes_no_sense_is_left_out() -> None:
    index = BlockIndex()
    source = follow(index)
    index.apply(
        source,
        [
            stored([1], [1, 2], parent=99),
            stored([1], [1, 2], block_size=3),
            stored([1], [1, 2], block_size=0),
            stored([1], [1, 1 << 40]),
            BlockRemoved([7], "GPU"),
        ],
    )
    assert index.size == 0


def test_a_stored_block_may_be_stored_again() -> None:
    index = BlockIndex()
    source = follow(index)
    index.apply(source, [stored([1], [1, 2]), stored([1], [1, 2])])
    assert index.size == 1
    index.apply(source, [BlockRemoved([1], "GPU")])
    assert cached(index, tokens(1, 2, 3)) == 0


def test_memory_is_bounded() -> None:
    index = BlockIndex(most_blocks=10)
    first, second = follow(index, A), follow(index, B)
    index.apply(first, [stored([*range(8)], [*range(16)])])
    index.apply(second, [stored([*range(8)], [*range(16)])])
    assert index.size == 10
    assert cached(index, tokens(*range(17)), B) == 16
    index.forget(A)
    index.forget(B)
    assert (index.size, swept(index)) == (0, {})


def test_blocks_that_prompts_match_are_kept() -> None:
    """Those of a system prompt were stored first, by each server."""
    index = BlockIndex(most_blocks=100)
    sources, system = [follow(index, A), follow(index, B)], [*range(8)]
    for source in sources:
        index.apply(source, [stored([1, 2, 3, 4], system)])
    for number in range(1, 200):
        own = [number, number]
        matched = index.cached(tokens(*system, *own, 0), [A, B], 0.0)
        assert matched == {A: 8, B: 8}, number
        index.apply(sources[number % 2], [stored([10 * number], own, parent=4)])
        assert index.size <= 100


def test_a_server_with_few_blocks_keeps_them() -> None:
    index = BlockIndex(most_blocks=100)
    large, small = follow(index, A), follow(index, B)
    index.apply(large, [stored([*range(100)], [*range(200)])])
    index.apply(small, [stored([1, 2], [5, 6, 7, 8])])
    assert cached(index, tokens(5, 6, 7, 8, 9), B) == 4
    assert index.size == 100
    index.apply(large, [BlockRemoved([*range(50)], "GPU")])
    index.apply(small, [stored([*range(3, 90)], [*range(174)], parent=2)])
    assert index.size == 100
    assert len(small.keys) > len(large.keys)


def test_marks_of_matches_leave_with_the_blocks() -> None:
    index = BlockIndex(most_blocks=4)
    source = follow(index)
    index.apply(source, [stored([1, 2], [1, 2, 3, 4])])
    assert cached(index, tokens(1, 2, 3, 4, 5)) == 4
    for event in (BlockRemoved([1], "GPU"), AllBlocksCleared()):
        index.apply(source, [event])
    assert (index.size, swept(index)) == (0, {})


def test_clearing_takes_no_time_that_depends_on_the_blocks() -> None:
    index = BlockIndex()
    source = follow(index)
    index.apply(source, [stored([*range(1, 1001)], [*range(2000)])])
    index.apply(source, [AllBlocksCleared()])
    assert (index.size, len(index._bits)) == (0, 1000)
    prompt = tokens(*range(2001))
    assert cached(index, prompt) == 0
    index.apply(source, [stored([1], [0, 1])])
    assert (index.size, cached(index, prompt)) == (1, 2)
    assert index.sweep(100)
    assert len(index._bits) < 1000
    for _ in range(20):
        index.apply(source, [stored([*range(1, 101)], [*range(200)]), AllBlocksCleared()])
    assert len(index._bits) <= 1000, "storing frees more than it takes"
    index.apply(source, [stored([1], [0, 1])])
    assert (len(swept(index)), cached(index, prompt)) == (1, 2)
    assert index._used_bits <= 6


def test_an_endpoint_that_was_sent_a_prompt_is_expected_to_cache_it() -> None:
    index = BlockIndex()
    source = follow(index)
    index.apply(source, [stored([1], [1, 2])])
    prompt = tokens(1, 2, 3, 4, 5)
    index.expect(prompt, A, 0.0)
    index.expect(prompt, B, 0.0)  # its cache is not followed
    assert cached(index, prompt) == 4
    assert index.cached(prompt, [B], 0.0) == {}
    assert cached(index, prompt, now=EXPECTED_S) == 2
    index.expect(prompt, A, 20.0)
    index.apply(source, [AllBlocksCleared()])
    assert cached(index, prompt, now=20.0) == 0
    index.apply(source, [stored([1], [1, 2])])
    index.expect(prompt, A, 21.0)
    index.forget(A)
    assert (index.size, swept(index)) == (0, {})
    assert cached(index, prompt, now=22.0) == 0
    assert cached(index, prompt, now=40.0) == 0
    assert not index._expected


def test_an_empty_cache_is_known_to_be_empty() -> None:
    index = BlockIndex()
    source = follow(index)
    assert index.cached(tokens(1, 2, 3), [A, B], 0.0) == {A: 0}
    index.lose(source)
    assert index.cached(tokens(1, 2, 3), [A, B], 0.0) == {}


KINDS = ("BlockStored", "BlockRemoved", "AllBlocksCleared", "GPU")
KEYS = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "extra_keys", "medium")
NOISE = st.recursive(
    st.none() | st.integers(-(1 << 63), (1 << 64) - 1) | st.binary(max_size=9) | st.sampled_from(KINDS),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=7),
    max_leaves=20,
)


@settings(max_examples=50)
@given(events=st.lists(NOISE, max_size=4), data=st.binary(max_size=40))
def test_noise_is_read_or_refused_and_leaves_an_index_in_order(events: list[Any], data: bytes) -> None:
    index = BlockIndex()
    source = follow(index)
    for batch in (data, msgspec.msgpack.encode([1.0, events, 0])):
        with suppress(ValueError):
            index.apply(source, decode_batch(batch))
    assert index.size == len(source.keys)
    index.lose(source)
    assert (index.size, swept(index)) == (0, {})
