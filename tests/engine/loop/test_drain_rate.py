from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.loop.drain_rate import MAX_RETRY_MS, MIN_RETRY_MS, WINDOW_S, DrainRate


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Engine:
    """Makes ten steps a second."""

    def __init__(self) -> None:
        self.clock = Clock(1000.0)
        self.rate = DrainRate(self.clock)

    def work(self, seconds: int, per_second: int) -> None:
        for _ in range(seconds):
            for step in range(10):
                self.rate.step(per_second * (step == 5))
                self.clock.now = round(self.clock.now + 0.1, 1)

    def rest(self, seconds: float) -> None:
        self.clock.now += seconds


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.mark.parametrize("seconds", [3, WINDOW_S, 10 * WINDOW_S])
@pytest.mark.parametrize(("per_second", "waiting", "expected"), [(4, 39, 10_000), (10, 24, 2_500)])
def test_queue_length_by_ends_per_second(
    engine: Engine, seconds: int, per_second: int, waiting: int, expected: int
) -> None:
    engine.work(seconds, per_second)
    assert engine.rate.retry_after_ms(waiting) == pytest.approx(expected, rel=0.05)


def test_bounds(engine: Engine) -> None:
    engine.work(5, 100)
    assert engine.rate.retry_after_ms(1) == MIN_RETRY_MS
    assert engine.rate.retry_after_ms(1_000_000) == MAX_RETRY_MS


def test_while_nothing_ends_the_wait_grows(engine: Engine) -> None:
    assert engine.rate.retry_after_ms(0) == MIN_RETRY_MS
    engine.work(4, 0)
    assert engine.rate.retry_after_ms(0) == 4_000
    assert engine.rate.retry_after_ms(2) == 12_000
    engine.work(WINDOW_S, 0)
    assert engine.rate.retry_after_ms(0) == pytest.approx(1_000 * WINDOW_S, rel=0.05)
    assert engine.rate.retry_after_ms(2) == MAX_RETRY_MS


def test_pauses_do_not_count(engine: Engine) -> None:
    engine.work(3, 5)
    engine.rest(10)
    engine.work(3, 5)
    assert engine.rate.retry_after_ms(49) == pytest.approx(10_000, rel=0.05)
    engine.rest(1000)
    assert engine.rate.retry_after_ms(49) == MIN_RETRY_MS  # as good as new


def test_slowing_down_shows_once_the_window_has_passed(engine: Engine) -> None:
    engine.work(WINDOW_S, 10)
    assert engine.rate.retry_after_ms(19) == 2_000
    engine.work(WINDOW_S, 1)
    assert engine.rate.retry_after_ms(19) == 20_000


@given(st.lists(st.tuples(st.integers(0, 100), st.floats(0, 100)), max_size=50), st.integers(0, 10**9))
def test_always_within_the_bounds(events: list[tuple[int, float]], waiting: int) -> None:
    clock = Clock(0.0)
    rate = DrainRate(clock)
    for ended, pause in events:
        rate.step(ended)
        clock.now += pause
    assert MIN_RETRY_MS <= rate.retry_after_ms(waiting) <= MAX_RETRY_MS
