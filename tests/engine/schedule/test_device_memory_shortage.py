"""Steps and streams after a lack of memory, without an engine."""

from __future__ import annotations

import numpy as np

from penstock.engine.schedule.device_memory_shortage import (
    GROW_STEPS,
    MAX_TRIES,
    REST_STEPS,
    UNLIMITED,
    MemoryShortage,
)


def test_steps_shrink_at_once_and_grow_slowly() -> None:
    shortage = MemoryShortage(100)
    shortage.shrink(30, 5)
    shortage.shrink(40, 6)
    assert shortage.step_tokens == 30
    grown = []
    for step in range(7, 7 + 3 * GROW_STEPS):
        shortage.begin_step(step)
        grown.append(shortage.step_tokens)
    assert [grown.count(tokens) for tokens in (30, 60, 100)] == [GROW_STEPS - 1, GROW_STEPS, GROW_STEPS + 1]
    shortage.shrink(0, 500)
    assert shortage.step_tokens == 1


def test_a_stream_is_tried_with_ever_fewer_tokens_and_rests_in_between() -> None:
    shortage = MemoryShortage(100)
    slots = np.array([3, 7])
    assert not shortage
    most = []
    for step in range(1, MAX_TRIES):
        assert shortage.may_try_again(7, 64, 64, step)
        most.append(shortage.most_tokens_of(7))
    assert most == [32, 16, 8, 4, 2, 1, 1]
    assert shortage.most_tokens(slots).tolist() == [UNLIMITED, 1]
    assert shortage.may_begin(slots, MAX_TRIES - 2 + REST_STEPS).tolist() == [True, False]
    assert shortage.may_begin(slots, MAX_TRIES - 1 + REST_STEPS).tolist() == [True, True]
    assert not shortage.may_try_again(7, 1, 64, 50)
    shortage.forget(7)
    assert not shortage
    assert shortage.most_tokens_of(7) == UNLIMITED


def test_a_stream_that_has_advanced_may_fail_as_often_again() -> None:
    shortage = MemoryShortage(100)
    computed = np.zeros(4, np.int32)
    for end in (40, 80):
        for _ in range(MAX_TRIES - 1):
            assert shortage.may_try_again(2, 40, end, 1)
        computed[2] = end - 1
        shortage.on_launched(computed, 1)
        assert shortage.may_try_again(2, 40, end, 1) is False
        computed[2] = end
        shortage.on_launched(computed, 1)
    assert shortage.may_try_again(2, 40, 80, 1)


def test_chunks_of_a_stream_grow_again() -> None:
    shortage = MemoryShortage(100)
    computed = np.full(4, 64, np.int32)
    for step in (1, 2, 3):
        shortage.may_try_again(2, 64, 65, step)
    computed[2] = 65
    most = []
    for step in range(4, 4 + 5 * GROW_STEPS):
        shortage.on_launched(computed, step)
        most.append(shortage.most_tokens_of(2))
    assert sorted({*most}) == [8, 16, 32, 64, UNLIMITED]
    assert most.count(16) == most.count(32) == GROW_STEPS
    assert not shortage
