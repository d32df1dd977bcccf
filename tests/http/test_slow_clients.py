"""When a connection's client counts as too slow, without a connection."""

from __future__ import annotations

import pytest

from penstock.http.slow_clients import MIN_BODY_RATE, SlowClientTimer, Verdict

REQUEST_S, KEEP_ALIVE_S = 30.0, 75.0


def check(
    timer: SlowClientTimer, now: float, *, reading: bool = True, replying: bool = False, unread: int = 0
) -> Verdict:
    return timer.check(now, REQUEST_S, KEEP_ALIVE_S, reading=reading, replying=replying, unread=unread)


def test_an_idle_connection_is_closed_after_the_keep_alive_time() -> None:
    timer = SlowClientTimer(100.0)
    assert check(timer, 175.0) is Verdict.KEEP
    assert check(timer, 175.1) is Verdict.IDLE


def test_the_head_of_a_request_has_its_time_to_arrive_and_is_late_once() -> None:
    timer = SlowClientTimer(0.0)
    timer.on_request_begin(100.0)
    assert check(timer, 130.0) is Verdict.KEEP
    assert check(timer, 130.1) is Verdict.LATE_HEAD
    assert timer.waiting_since is None


def upload(seconds: int, every: int, size: int) -> tuple[int, Verdict]:
    """A body of which ``size`` bytes come ``every`` so many seconds: when it ends, and how."""
    timer = SlowClientTimer(0.0)
    timer.on_request_begin(0.0)
    timer.on_body_begin(0.0)
    for now in range(1, seconds + 1):
        if now % every == 0:
            timer.on_body(float(now), size)
        if (verdict := check(timer, float(now))) is not Verdict.KEEP:
            return now, verdict
    return seconds, Verdict.KEEP


@pytest.mark.parametrize(
    ("every", "size", "ends", "verdict"),
    [
        (1, MIN_BODY_RATE, 10_000, Verdict.KEEP),
        (25, 30 * MIN_BODY_RATE, 10_000, Verdict.KEEP),
        (40, 1 << 20, 31, Verdict.STALLED_BODY),
        (1, MIN_BODY_RATE // 2, 61, Verdict.SLOW_BODY),
        (1, 1, 31, Verdict.SLOW_BODY),
    ],
    ids=["steady", "in bursts", "a pause", "half as fast", "a byte a second"],
)
def test_a_body_may_take_long_but_not_pause_nor_trickle(
    every: int, size: int, ends: int, verdict: Verdict
) -> None:
    assert upload(10_000, every, size) == (ends, verdict)


def test_a_body_has_the_time_that_it_has_earned() -> None:
    """But no pause of that length."""
    timer = SlowClientTimer(0.0)
    timer.on_body_begin(0.0)
    timer.on_body(0.0, 1000 * MIN_BODY_RATE)
    for now in range(0, 1020, 20):
        timer.on_body(float(now), 1)
        assert check(timer, float(now)) is Verdict.KEEP
    timer.on_body(1031.0, 1)
    assert check(timer, 1031.0) is Verdict.SLOW_BODY


def test_the_next_body_earns_its_own_time() -> None:
    timer = SlowClientTimer(0.0)
    timer.on_body_begin(0.0)
    timer.on_body(1.0, 1 << 20)
    timer.on_request_complete()
    timer.on_body_begin(100.0)
    assert check(timer, 130.0) is Verdict.KEEP
    assert check(timer, 130.1) is Verdict.STALLED_BODY


def test_a_request_is_not_late_while_the_server_does_not_read_it() -> None:
    timer = SlowClientTimer(0.0)
    timer.on_request_begin(100.0)
    assert check(timer, 500.0, reading=False) is Verdict.KEEP
    assert check(timer, 530.0) is Verdict.KEEP
    assert check(timer, 530.1) is Verdict.LATE_HEAD
    timer.on_body_begin(600.0)
    assert check(timer, 900.0, reading=False) is Verdict.KEEP
    assert check(timer, 930.0) is Verdict.KEEP
    assert check(timer, 930.1) is Verdict.STALLED_BODY


@pytest.mark.parametrize(("later", "verdict"), [(10, Verdict.NOT_READING), (9, Verdict.KEEP)])
def test_a_client_that_takes_some_bytes_reads(later: int, verdict: Verdict) -> None:
    timer = SlowClientTimer(0.0)
    timer.on_request_begin(1.0)
    timer.on_request_complete()
    assert check(timer, 100.0, unread=10) is Verdict.KEEP
    assert check(timer, 175.1, unread=later) is verdict


def test_a_reply_in_progress_may_be_silent() -> None:
    timer = SlowClientTimer(0.0)
    timer.on_request_begin(1.0)
    timer.on_request_complete()
    assert check(timer, 10_000.0, replying=True, unread=5) is Verdict.KEEP
    timer.on_last_reply(10_000.0)
    assert check(timer, 10_075.1, unread=5) is Verdict.NOT_READING


def test_a_closed_connection_times_nothing() -> None:
    timer = SlowClientTimer(0.0)
    timer.on_request_begin(1.0)
    timer.on_close()
    assert (timer.waiting_since, timer.idle_since) == (None, None)
