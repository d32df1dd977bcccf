"""When a connection's client counts as too slow, without a connection."""

from __future__ import annotations

import pytest

from penstock.http.slow_clients import SlowClientTimer, Verdict

REQUEST_S, KEEP_ALIVE_S = 30.0, 75.0


def check(
    timer: SlowClientTimer, now: float, *, reading: bool = True, replying: bool = False, unread: int = 0
) -> Verdict:
    return timer.check(now, REQUEST_S, KEEP_ALIVE_S, reading=reading, replying=replying, unread=unread)


def test_an_idle_connection_is_closed_after_the_keep_alive_time() -> None:
    timer = SlowClientTimer(100.0)
    assert check(timer, 175.0) is Verdict.KEEP
    assert check(timer, 175.1) is Verdict.IDLE


def test_a_request_has_its_time_to_arrive_and_is_late_once() -> None:
    timer = SlowClientTimer(0.0)
    timer.on_request_begin(100.0)
    assert check(timer, 130.0) is Verdict.KEEP
    assert check(timer, 130.1) is Verdict.REQUEST_TIMEOUT
    assert timer.waiting_since is None


def test_a_request_is_not_late_while_the_server_does_not_read_it() -> None:
    timer = SlowClientTimer(0.0)
    timer.on_request_begin(100.0)
    assert check(timer, 500.0, reading=False) is Verdict.KEEP
    assert check(timer, 530.0) is Verdict.KEEP
    assert check(timer, 530.1) is Verdict.REQUEST_TIMEOUT


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
