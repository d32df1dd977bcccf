"""Where streams go."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dispatch.load_balancer import (
    AFFINITY_FACTOR,
    AFFINITY_SLACK,
    BLOCK_BYTES,
    MAX_BLOCKS,
    MAX_KEYS,
    LoadBalancer,
    affinity_keys,
)


def test_a_burst_is_spread_exactly() -> None:
    """From several API servers, each of which knows only what it has submitted itself."""
    total: Counter[int] = Counter()
    for server in range(4):
        balancer = LoadBalancer(4, first=server)
        loads: list[int | None] = [0] * 4
        for _ in range(25):
            rank = balancer.choose(loads)
            assert rank is not None
            loads[rank] = (loads[rank] or 0) + 1
            total[rank] += 1
    assert set(total.values()) == {25}


def test_the_least_loaded_engine_that_is_up_is_taken() -> None:
    balancer = LoadBalancer(4, first=0)
    assert balancer.choose([3, None, 1, 2]) == 2
    assert balancer.choose([None, None, None, 9]) == 3
    assert balancer.choose([None] * 4) is None


def test_sessions_stay_while_their_engine_is_not_overloaded() -> None:
    balancer = LoadBalancer(3, first=1)
    keys = affinity_keys(b"", None, "s")
    assert balancer.choose([0, 0, 0], keys) == 1
    assert balancer.choose([0, AFFINITY_SLACK, 0], keys) == 1
    assert balancer.choose([0, AFFINITY_SLACK + 1, 0], keys) == 2
    assert balancer.choose([9, 9, 9], keys) == 2, "it stays at its new engine"
    assert balancer.choose([5, 0, None], keys) == 1


def test_the_longest_known_beginning_decides() -> None:
    short, long = bytes(BLOCK_BYTES), bytes(BLOCK_BYTES) + b"x" * BLOCK_BYTES
    balancer = LoadBalancer(2, first=0)
    assert balancer.choose([0, 1], affinity_keys(long, None, None)) == 0
    assert balancer.choose([9, 1], affinity_keys(short, None, None)) == 1
    assert balancer.choose([0, 1], affinity_keys(short + b"y" * BLOCK_BYTES, None, None)) == 1
    assert balancer.choose([1, 0], affinity_keys(long + b"y" * BLOCK_BYTES, None, None)) == 0


def test_keys_stand_for_whole_beginnings() -> None:
    prompt = bytes(range(256)) * 12
    assert len(affinity_keys(prompt, None, None)) == 3
    assert affinity_keys(prompt, None, None)[1:] == affinity_keys(prompt[: 2 * BLOCK_BYTES], None, None)
    assert not set(affinity_keys(prompt, "salt", None)) & set(affinity_keys(prompt, None, None))
    assert affinity_keys(prompt[: BLOCK_BYTES - 4], None, None) == ()
    assert len(affinity_keys(bytes(MAX_BLOCKS * BLOCK_BYTES), None, "s")) == MAX_BLOCKS + 1
    assert len(affinity_keys(bytes(1 << 26), None, "s")) < 3 * MAX_BLOCKS


@pytest.mark.parametrize("common", [40, 100, 390])
def test_conversations_that_part_late_have_their_own_engines(common: int) -> None:
    """Those of one agent begin with the same system prompt, as long as a book."""
    system = random.Random(1).randbytes(common * BLOCK_BYTES)
    balancer = LoadBalancer(2, first=0)
    history = {name: system + name * (common // 5 * BLOCK_BYTES) for name in (b"a", b"b")}
    assert balancer.choose([0, 9], affinity_keys(history[b"a"], None, None)) == 0
    assert balancer.choose([9, 0], affinity_keys(history[b"b"], None, None)) == 1
    for turn in range(5):
        for name, rank in ((b"a", 0), (b"b", 1)):
            history[name] += bytes([turn]) * BLOCK_BYTES
            assert balancer.choose([1, 1], affinity_keys(history[name], None, None)) == rank


def test_memory_is_bounded() -> None:
    balancer = LoadBalancer(2, first=0)
    for key in range(MAX_KEYS + 10):
        balancer.choose([0, 0], [key])
    assert len(balancer._known) == MAX_KEYS


@given(
    st.lists(st.one_of(st.none(), st.integers(0, 40)), min_size=3, max_size=3),
    st.lists(st.sampled_from([1, 2, 3]), max_size=3),
    st.integers(0, 2),
)
def test_affinity_is_bounded_by_load(loads: list[int | None], keys: list[int], known: int) -> None:
    balancer = LoadBalancer(3, first=0)
    balancer.choose([0 if rank == known else None for rank in range(3)], [1])
    rank = balancer.choose(loads, keys)
    up = [load for load in loads if load is not None]
    if rank is None:
        assert not up
    else:
        load = loads[rank]
        assert load is not None
        assert load <= AFFINITY_FACTOR * min(up) + AFFINITY_SLACK


def test_keys_are_small_however_long_sessions_are() -> None:
    keys = affinity_keys(bytes(BLOCK_BYTES), "salt", "s" * 65536)
    assert [-(1 << 63) <= key < 1 << 63 for key in keys] == [True, True]


def test_sessions_of_different_tenants_are_different_sessions() -> None:
    """The salt begins with the tenant, if there are several."""
    assert affinity_keys(b"", "one", "s") != affinity_keys(b"", "two", "s")
