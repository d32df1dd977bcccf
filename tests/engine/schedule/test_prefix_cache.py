"""Shared prefixes against a cache whose contents are known (tests/engine/paged.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.schedule.admission import MAX_HELD_PER_STEP
from penstock.engine.schedule.block_tables import BlockTables
from penstock.engine.schedule.idle_runs import LIFETIMES, lifetime
from tests.engine.paged import Driver, make_scheduler
from tests.engine.support import Clock, submit

BLOCK = 4


def make(slots: int = 4, blocks: int = 40, **options: Any) -> Driver:
    return Driver(make_scheduler(slots, blocks, block_size=BLOCK, **options))


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + index) % 50 for index in range(length)]


def one(driver: Driver, stream: int, tokens: list[int], output: int = 1, **more: Any) -> int:
    """Run a stream alone, to its end; returns its cached tokens."""
    driver.submit(stream, tokens, output, **more)
    driver.finish()
    return driver.cached.get(stream, 0)


# -- what is found


@pytest.mark.parametrize(
    ("length", "found"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (16, 12), (17, 16), (30, 20)]
)
def test_full_blocks_are_found_but_for_the_last_token(length: int, found: int) -> None:
    driver = make()
    one(driver, 0, prompt(22))
    assert one(driver, 1, prompt(length)) == found


def test_output_is_found_by_the_next_turn() -> None:
    driver = make()
    one(driver, 0, prompt(6), 11)
    history = prompt(6) + driver.received.tokens[0]
    assert one(driver, 1, [*history, 7, 7]) == 16


def test_many_turns_leave_few_runs() -> None:
    driver = Driver(make_scheduler(1, 400, block_size=BLOCK, model_len=1024, max_num_batched_tokens=1024))
    history = prompt(401)
    for turn in range(64):
        assert one(driver, turn, history) == (len(history) - 5 if turn else 0)
        history += [turn % 50] * BLOCK
        driver.check()
    cache = driver.scheduler.prefix_cache
    (end,) = [run for run in cache._idle if not run.children]
    assert sum(1 for _ in cache._to_root(end)) <= 8


def test_other_beginnings_salts_and_engines_without_a_cache_find_nothing() -> None:
    driver = make()
    one(driver, 0, prompt(20))
    one(driver, 1, prompt(20), salt="a")
    assert one(driver, 2, prompt(20, first=1)) == 0
    assert one(driver, 3, prompt(20), salt="b") == 0
    assert one(driver, 4, prompt(20), salt="") == 0
    assert one(driver, 5, prompt(20), salt="a") == 16
    without = make(enable_prefix_caching=False)
    assert [one(without, stream, prompt(20)) for stream in range(2)] == [0, 0]
    assert without.scheduler.prefix_cache.queries == 0


def test_a_block_with_the_same_tokens_elsewhere_is_another_block() -> None:
    driver = make()
    one(driver, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert one(driver, 1, [5, 6, 7, 8, 9]) == 0
    assert one(driver, 2, [1, 2, 3, 4, 1, 2, 3, 4, 9]) == 4


@pytest.mark.parametrize(("prompt_logprobs", "found"), [(-1, 16), (0, 0), (5, 0)])
def test_prompt_logprobs_need_the_whole_prompt_computed(prompt_logprobs: int, found: int) -> None:
    driver = make()
    one(driver, 0, prompt(20))
    cache = driver.scheduler.prefix_cache
    prefix = cache.prefix_of(submit(1, prompt=prompt(20), prompt_logprobs=prompt_logprobs))
    match = cache.find_prefix(prefix)
    assert match is not None
    assert match.blocks * BLOCK == found
    cache.record_lookup(prefix, 20, match)
    assert cache.queries == 20 + (20 if found else 0)


def test_queries_and_hits_count_tokens() -> None:
    driver = make()
    for stream in range(3):
        one(driver, stream, prompt(10))
    assert (driver.scheduler.prefix_cache.queries, driver.scheduler.prefix_cache.hits) == (30, 16)


def test_a_resumed_stream_does_not_report_what_it_found() -> None:
    driver = make()
    one(driver, 0, prompt(20))
    driver.received.tokens[1] = prompt(20)[15:]
    assert one(driver, 1, prompt(20), 9, resumed=5) == 0
    assert driver.scheduler.prefix_cache.hits == 16


# -- what is kept


def test_the_longest_idle_blocks_are_emptied_first_and_ends_before_beginnings() -> None:
    driver = make(blocks=10)
    one(driver, 0, prompt(17))  # 4 full blocks, 1 begun
    one(driver, 1, prompt(17, first=20))
    one(driver, 2, prompt(13, first=40))  # needs 4: 2 free, and the last 2 kept of stream 0
    assert one(driver, 3, prompt(17)) == 8  # needs 3 more: 1 free, and the last 2 kept of stream 1
    assert one(driver, 4, prompt(17, first=20)) == 8


def test_what_is_idle_counts_as_free() -> None:
    driver = make(blocks=10)
    one(driver, 0, prompt(20))
    blocks = driver.scheduler.blocks
    assert blocks.idle == 5
    assert blocks.free_count() == 10
    assert blocks.usage() == 0.0
    assert one(driver, 1, prompt(38, first=9), 2) == 0


def test_a_reset_forgets_idle_and_running() -> None:
    driver = make()
    one(driver, 0, prompt(20))
    driver.submit(1, prompt(20, first=5), 9)
    driver.step()
    driver.scheduler.prefix_cache.reset()
    assert driver.scheduler.blocks.idle == 0
    driver.finish()
    assert driver.scheduler.blocks.idle == 0
    assert one(driver, 2, prompt(20)) == 0
    assert one(driver, 3, prompt(20, first=5)) == 0
    assert one(driver, 4, prompt(20)) == 16


# -- prompts that are being computed


def test_nobody_waits_for_a_block_that_the_last_token_fills() -> None:
    driver = make(max_num_batched_tokens=15)
    driver.submit(0, prompt(16), 30)
    driver.step()
    driver.submit(1, prompt(20), 1)
    for _ in range(4):
        driver.step()
    assert driver.received.finish.keys() == {1}
    assert driver.cached == {1: 12}


def test_equal_prompts_are_computed_once() -> None:
    driver = make(slots=8, max_num_batched_tokens=16)
    for stream in range(5):
        driver.submit(stream, prompt(41), 3)
    driver.finish()
    assert driver.prefilled <= 41
    assert driver.cached == dict.fromkeys(range(1, 5), 40)
    outputs = list(driver.received.tokens.values())
    assert outputs == [outputs[0]] * 5


def test_streams_wait_only_for_what_they_share() -> None:
    driver = make(slots=8, max_num_batched_tokens=24)
    driver.submit(0, prompt(40), 1)
    driver.submit(1, prompt(40), 1)
    driver.submit(2, [*prompt(8), 49, 49, 49], 1)
    driver.submit(3, prompt(5, first=30), 1)
    order: list[int] = []
    driver.finish(each=lambda batch: order.extend(sorted(driver.received.finish.keys() - set(order))))
    assert order == [0, 2, 3, 1]
    assert driver.cached == {1: 36, 2: 8}


def test_streams_that_wait_for_a_prefix_are_in_nobodys_way() -> None:
    equal = 2 * MAX_HELD_PER_STEP
    driver = make(slots=200, blocks=2000, max_num_batched_tokens=24)
    for stream in range(equal):
        driver.submit(stream, prompt(40), 1)
    driver.submit(equal, prompt(4, first=30), 1)
    for _ in range(2):
        driver.step()
    assert driver.received.finish.keys() == {0, equal}
    driver.finish()
    assert len(driver.received.finish) == equal + 1


def test_streams_that_waited_for_a_prefix_come_before_later_ones() -> None:
    driver = make(slots=2, blocks=2000, max_num_batched_tokens=8)
    for stream in range(3):
        driver.submit(stream, prompt(40), 1)
    for stream in range(3, 6):
        driver.submit(stream, prompt(40, first=30), 20)
    order: list[int] = []
    driver.finish(each=lambda batch: order.extend(sorted(driver.received.finish.keys() - set(order))))
    assert order.index(2) < order.index(4)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_who_waits_goes_on_when_the_other_is_aborted(steps: int) -> None:
    driver = make(slots=4, max_num_batched_tokens=8)
    driver.submit(0, prompt(40), 1)
    driver.submit(1, prompt(40), 1)
    for _ in range(steps):
        driver.step()
    assert driver.scheduler.waiting() == 1
    driver.scheduler.abort(0, [0])
    driver.finish()
    assert len(driver.received.tokens[1]) == 1
    assert driver.cached[1] == 8 * steps


# -- everything at once

requests = st.lists(
    st.tuples(
        st.integers(0, 3),  # how the prompt begins
        st.integers(1, 40),  # tokens of it
        st.integers(0, 3),  # tokens of its own
        st.integers(1, 24),  # output
        st.sampled_from([None, None, "a", "b"]),
        st.integers(0, 20),  # the step before which it comes
        st.sampled_from([None, None, None, 0, 1, 5]),  # steps until it is aborted
        st.integers(0, 2),  # priority
    ),
    min_size=1,
    max_size=14,
)


@given(
    requests,
    st.integers(1, 6),
    st.integers(17, 60),
    st.integers(1, 40),
    st.sampled_from(["fcfs", "priority"]),
    st.none() | st.integers(0, 30),
)
def test_every_stream_reads_its_own_history(
    load: list[Any], slots: int, blocks: int, budget: int, policy: str, reset: int | None
) -> None:
    driver = make(slots, blocks, max_num_batched_tokens=budget, scheduling_policy=policy)
    expected: dict[int, list[int]] = {}
    for step in range(3000):
        for stream, (begin, shared, own, output, salt, first, abort, priority) in enumerate(load):
            if step == first:
                tokens = prompt(shared, first=begin * 13) + [stream % 50] * own
                driver.submit(stream, tokens, output, salt=salt, priority=priority)
            if abort is not None and step == first + abort:
                driver.scheduler.abort(0, [stream])
        if step == reset:
            driver.scheduler.prefix_cache.reset()
        driver.step()
        if step > 30 and not driver.scheduler.has_work():
            break
    assert driver.received.finish.keys() == set(range(len(load)))
    assert driver.scheduler.blocks.free_count() == blocks
    assert not driver.scheduler.prefix_cache._held
    assert not driver.scheduler.prefix_cache._preempted
    assert not driver.scheduler.prefix_cache._awaited
    for stream, tokens in driver.received.tokens.items():
        alone = make(1, 40)
        begin, shared, own, output, salt, *_ = load[stream]
        one(alone, stream, prompt(shared, first=begin * 13) + [stream % 50] * own, output, salt=salt)
        expected[stream] = alone.received.tokens[stream]
        assert tokens == expected[stream][: len(tokens)]


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=1, max_size=24),
            st.integers(1, 12),
            st.sampled_from([None, "a"]),
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_all_that_was_computed_is_found(turns: list[tuple[list[int], int, str | None, bool]]) -> None:
    driver = make(slots=1, blocks=400)
    known: set[tuple[Any, ...]] = set()
    history: list[int] = []
    for stream, (tokens, output, salt, follows) in enumerate(turns):
        asked = (history + tokens)[-40:] if follows else tokens
        most = (len(asked) - 1) // BLOCK
        depth = next((n for n in range(most) if (salt, *asked[: (n + 1) * BLOCK]) not in known), most)
        assert one(driver, stream, asked, output, salt=salt) == depth * BLOCK
        history = asked + driver.received.tokens[stream]
        computed = len(history) - 1  # the last token was never fed back
        known |= {(salt, *history[: n * BLOCK]) for n in range(1, computed // BLOCK + 1)}


# -- blocks alone


def test_blocks_wanted_beyond_what_is_there() -> None:
    blocks = BlockTables(2, 3, BLOCK, 64)
    with pytest.raises(ValueError, match="4 KV blocks wanted, 3 are free"):
        blocks.allocate(np.array([0]), np.array([4], np.int32))


# -- what clients want kept


def clocked(blocks: int = 40) -> tuple[Driver, Clock]:
    driver, clock = make(blocks=blocks), Clock()
    driver.scheduler.prefix_cache._idle._clock = lambda: clock.now
    return driver, clock


def fill(driver: Driver, first: int, count: int, **more: Any) -> None:
    """Run other prompts of four blocks each, alone."""
    for stream in range(first, first + count):
        one(driver, stream, prompt(17, first=stream * 7), **more)


def test_what_is_wanted_is_evicted_last_until_its_time_is_over() -> None:
    driver, clock = clocked()
    one(driver, 0, prompt(25), keep_s=300)
    fill(driver, 1, 20)
    assert one(driver, 90, prompt(25)) == 24
    fill(driver, 21, 20)  # the use has renewed it, though it has no hint
    clock.now += 299.0
    assert one(driver, 91, prompt(25)) == 24
    clock.now += 301.0
    fill(driver, 41, 20)
    assert one(driver, 92, prompt(25)) == 0


def test_a_longer_lifetime_outlives_a_shorter_one() -> None:
    driver, clock = clocked()
    one(driver, 0, prompt(13), keep_s=3600)
    one(driver, 1, prompt(13, first=30), keep_s=60)
    clock.now += 61.0
    fill(driver, 2, 20)
    assert one(driver, 90, prompt(13)) == 12
    assert one(driver, 91, prompt(13, first=30)) == 0


def test_a_common_beginning_lives_as_long_as_the_longest_wants() -> None:
    driver, _ = clocked()
    one(driver, 0, prompt(16) + [1] * 8, keep_s=300)
    one(driver, 1, prompt(16) + [2] * 8)
    fill(driver, 2, 20)
    assert one(driver, 90, prompt(16) + [1] * 8) == 20
    fill(driver, 22, 20)
    assert one(driver, 91, prompt(16) + [2] * 8) == 16


def test_a_client_that_wants_everything_pushes_out_nobody_elses() -> None:
    driver, _ = clocked(blocks=80)
    one(driver, 0, prompt(33), keep_s=300, salt="good")
    fill(driver, 1, 60, keep_s=86400, salt="greedy")
    idle = driver.scheduler.prefix_cache._idle
    assert idle._tenants["greedy"].blocks <= 20
    assert one(driver, 90, prompt(33), salt="good") == 32
    # neither does it take the room of those who say nothing: what it does not keep is evicted before
    one(driver, 91, prompt(33), salt="silent")
    fill(driver, 92, 4, keep_s=86400, salt="greedy")
    assert one(driver, 99, prompt(33), salt="silent") == 32


def test_many_tenants_keep_half_of_the_cache_at_most() -> None:
    driver, _ = clocked(blocks=80)
    for tenant in range(30):
        fill(driver, 5 * tenant, 5, keep_s=86400, salt=f"t{tenant}")
    assert driver.scheduler.prefix_cache._idle.kept_blocks <= 40
    one(driver, 200, prompt(33))
    assert one(driver, 201, prompt(33)) == 32


def test_lifetimes_are_few() -> None:
    assert {lifetime(seconds) for seconds in range(86401)} == {0, *LIFETIMES}
    assert (lifetime(300), lifetime(301)) == (300, 1800)
