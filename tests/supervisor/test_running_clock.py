from __future__ import annotations

from penstock.supervisor.running_clock import MAX_DELAY_S, MAX_WAIT_S, RunningClock


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_waits_and_work_count() -> None:
    time = Time()
    clock = RunningClock(time)
    start = clock.now()
    for _ in range(10):
        clock.wait(MAX_WAIT_S)
        time.now += MAX_WAIT_S + MAX_DELAY_S  # a little late
        clock.now()
        time.now += 0.5  # work
    assert clock.now() - start == 10 * (MAX_WAIT_S + MAX_DELAY_S + 0.5)


def test_time_in_which_the_process_was_stopped_in_a_wait_does_not_count() -> None:
    time = Time()
    clock = RunningClock(time)
    start = clock.now()
    clock.wait(MAX_WAIT_S)
    time.now += MAX_WAIT_S + 3600.0
    assert clock.now() == start


def test_time_in_which_the_process_was_stopped_at_work_does_not_count() -> None:
    time = Time()
    clock = RunningClock(time)
    start = clock.now()
    time.now += 60.0
    assert clock.now() == start
    time.now += 1.0
    assert clock.now() - start == 1.0
