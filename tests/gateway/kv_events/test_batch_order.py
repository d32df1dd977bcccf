"""The batches that a subscriber applies, whatever the network did to them."""

from __future__ import annotations

import random

import pytest

from penstock.gateway.kv_events.batch_order import (
    CLEAR,
    LOST,
    MAX_HELD,
    MAX_HELD_BYTES,
    BatchOrder,
    FallbackStep,
)


def batch(number: int) -> bytes:
    return b"%d" % number


def batches(*numbers: int) -> list[FallbackStep]:
    return [batch(number) for number in numbers]


def live(order: BatchOrder, *numbers: int) -> list[FallbackStep]:
    return [step for number in numbers for step in order.on_live(number, batch(number))]


def replay(order: BatchOrder, *numbers: int) -> list[FallbackStep]:
    steps = [step for number in numbers for step in order.on_replayed(number, batch(number))]
    return steps + order.on_replay_ended()


def test_a_new_subscriber_replays_what_came_before_it() -> None:
    order = BatchOrder(replays=True)
    assert order.on_connected() == [CLEAR]
    assert order.wanted == 0
    assert live(order, 3, 4) == []
    assert replay(order, 0, 1, 2, 3) == batches(0, 1, 2, 3, 4)
    assert order.wanted is None
    assert live(order, 5) == batches(5)


def test_a_gap_is_replayed() -> None:
    order = BatchOrder(replays=True)
    order.on_connected()
    assert replay(order) == []
    assert live(order, 0, 1, 4) == batches(0, 1)
    assert order.wanted == 2
    assert live(order, 5) == []
    assert replay(order, 2, 3, 4, 5) == batches(2, 3, 4, 5)


def test_what_is_no_longer_kept_is_lost_with_all_that_was_known() -> None:
    order = BatchOrder(replays=True)
    order.on_connected()
    replay(order)
    live(order, 0, 9)
    assert replay(order, 5, 6, 7, 8) == [CLEAR, *batches(5, 6, 7, 8, 9)]
    live(order, 20)
    assert replay(order) == [CLEAR, *batches(20)]
    live(order, 30)
    assert order.on_replay_failed() == [CLEAR, *batches(30)]
    assert order.wanted is None


def test_without_a_replay_socket_a_gap_forgets_everything() -> None:
    order = BatchOrder(replays=False)
    assert order.on_connected() == [CLEAR]
    assert order.wanted is None
    assert live(order, 7, 8, 10, 11) == [*batches(7, 8), CLEAR, *batches(10, 11)]


@pytest.mark.parametrize("replays", [True, False])
def test_a_publisher_that_begins_anew(replays: bool) -> None:
    order = BatchOrder(replays=replays)
    order.on_connected()
    if replays:
        replay(order)
    live(order, 0, 1, 2)
    assert live(order, 0) == ([CLEAR] if replays else [CLEAR, *batches(0)])
    if replays:
        assert order.wanted == 0
        assert replay(order, 0) == batches(0)


def test_a_lost_connection_forgets_everything() -> None:
    order = BatchOrder(replays=True)
    order.on_connected()
    live(order, 1)
    assert order.on_disconnected() == [LOST]
    assert order.wanted is None
    assert order.on_connected() == [CLEAR]
    assert replay(order, 0, 1) == batches(0, 1)


def test_what_waits_for_a_replay_is_bounded() -> None:
    order = BatchOrder(replays=True)
    order.on_connected()
    steps = live(order, *range(MAX_HELD + 1))
    assert steps == [CLEAR, *batches(*range(MAX_HELD + 1))]
    assert order.wanted is None


def test_what_waits_for_a_replay_is_bounded_by_its_size_too() -> None:
    order, large = BatchOrder(replays=True), bytes(MAX_HELD_BYTES // 8 + 1)
    order.on_connected()
    for number in range(7):
        assert order.on_live(number, large) == []
    assert order.on_live(7, large) == [CLEAR, *(8 * [large])]
    assert order.wanted is None
    order.on_connected()
    for number in range(8, 15):
        assert order.on_live(number, large) == [], "counted from the start"


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_dropped_the_rest_is_whole(seed: int) -> None:
    """After the last CLEAR there is no gap, and with all replays kept none at all."""
    rng = random.Random(seed)
    order = BatchOrder(replays=True)
    steps = order.on_connected()
    for number in range(60):
        if rng.random() < 0.7:
            steps += live(order, number)
        if order.wanted is not None and rng.random() < 0.5:
            steps += replay(order, *range(order.wanted, number + 1))
    if order.wanted is not None:
        steps += replay(order, *range(order.wanted, 60))
    applied = [step for step in steps if step is not CLEAR]
    assert applied == batches(*range(len(applied)))
    assert steps.count(CLEAR) == 1
