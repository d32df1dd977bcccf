"""A failing endpoint is left alone, probed, and taken back."""

from __future__ import annotations

from penstock.gateway.breaker import CONSECUTIVE, FIRST_PAUSE_S, LEAST, LONGEST_PAUSE_S, Breaker


def opened() -> Breaker:
    breaker = Breaker()
    for _ in range(CONSECUTIVE):
        assert breaker.allows(0.0)
        breaker.sent(0.0)
        breaker.failed(0.0, 0.0)
    return breaker


def test_failures_in_a_row_open_it() -> None:
    breaker = opened()
    assert not breaker.allows(0.0)
    assert not breaker.allows(FIRST_PAUSE_S - 0.01)


def test_a_success_in_between_keeps_it_closed() -> None:
    breaker = Breaker()
    for _ in range(CONSECUTIVE - 1):
        breaker.failed(0.0, 0.0)
    breaker.succeeded(0.0, 0.0)
    breaker.failed(0.0, 0.0)
    assert breaker.allows(0.0)


def test_many_failures_among_successes_open_it() -> None:
    breaker = Breaker()
    for _ in range(LEAST):
        breaker.failed(0.0, 0.0)
        breaker.succeeded(0.0, 0.0)
        if not breaker.closed:
            break
    breaker.failed(0.0, 0.0)
    assert not breaker.closed


def test_old_failures_are_forgotten() -> None:
    breaker = Breaker()
    for _ in range(LEAST // 2 - 1):
        breaker.failed(0.0, 0.0)
        breaker.succeeded(0.0, 0.0)
    breaker.failed(1000.0, 1000.0)
    assert breaker.closed


def test_half_open_lets_one_probe_pass() -> None:
    breaker = opened()
    assert breaker.allows(FIRST_PAUSE_S)
    breaker.sent(FIRST_PAUSE_S)
    assert not breaker.allows(FIRST_PAUSE_S)


def test_a_good_probe_closes_it() -> None:
    breaker = opened()
    breaker.sent(2.0)
    breaker.succeeded(2.1, 2.0)
    assert breaker.closed
    assert breaker.allows(2.1)
    breaker.failed(2.2, 2.2)
    assert breaker.closed, "what was before the recovery no longer counts"


def test_a_bad_probe_doubles_the_pause() -> None:
    breaker = opened()
    breaker.sent(FIRST_PAUSE_S)
    breaker.failed(FIRST_PAUSE_S, FIRST_PAUSE_S)
    assert not breaker.allows(2.9 * FIRST_PAUSE_S)
    assert breaker.allows(3 * FIRST_PAUSE_S)


def test_a_probe_that_tells_nothing_makes_room_for_another() -> None:
    breaker = opened()
    breaker.sent(2.0)
    breaker.released()
    assert breaker.allows(2.0)


def test_a_lost_probe_does_not_close_the_endpoint_for_good() -> None:
    breaker = opened()
    breaker.sent(2.0)
    assert breaker.allows(2.0 + LONGEST_PAUSE_S)


def test_requests_that_were_sent_before_it_opened_do_not_count_as_probes() -> None:
    breaker = opened()
    breaker.failed(0.5, 0.5)
    breaker.succeeded(0.6, 0.6)
    assert not breaker.allows(0.9)
    assert breaker.allows(FIRST_PAUSE_S)


def test_long_replies_from_before_do_not_speak_for_the_probe() -> None:
    breaker = opened()
    breaker.succeeded(2.0, sent_at=-60.0)
    assert not breaker.closed
    breaker.failed(2.0, sent_at=-60.0)
    assert breaker.allows(2.0), "nor do they make the pause longer"
