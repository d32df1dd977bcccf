"""A failing endpoint is left alone, probed, and taken back."""

from __future__ import annotations

from penstock.gateway.routing.circuit_breaker import (
    CONSECUTIVE_FAILURES,
    FIRST_OPEN_S,
    MAX_OPEN_S,
    MIN_REQUESTS,
    CircuitBreaker,
)


def opened() -> CircuitBreaker:
    breaker = CircuitBreaker()
    for _ in range(CONSECUTIVE_FAILURES):
        assert breaker.allows(0.0)
        breaker.request_sent(0.0)
        breaker.record_failure(0.0, 0.0)
    return breaker


def test_failures_in_a_row_open_it() -> None:
    breaker = opened()
    assert not breaker.allows(0.0)
    assert not breaker.allows(FIRST_OPEN_S - 0.01)


def test_a_success_in_between_keeps_it_closed() -> None:
    breaker = CircuitBreaker()
    for _ in range(CONSECUTIVE_FAILURES - 1):
        breaker.record_failure(0.0, 0.0)
    breaker.record_success(0.0, 0.0)
    breaker.record_failure(0.0, 0.0)
    assert breaker.allows(0.0)


def test_many_failures_among_successes_open_it() -> None:
    breaker = CircuitBreaker()
    for _ in range(MIN_REQUESTS):
        breaker.record_failure(0.0, 0.0)
        breaker.record_success(0.0, 0.0)
        if not breaker.closed:
            break
    breaker.record_failure(0.0, 0.0)
    assert not breaker.closed


def test_old_failures_are_forgotten() -> None:
    breaker = CircuitBreaker()
    for _ in range(MIN_REQUESTS // 2 - 1):
        breaker.record_failure(0.0, 0.0)
        breaker.record_success(0.0, 0.0)
    breaker.record_failure(1000.0, 1000.0)
    assert breaker.closed


def test_half_open_lets_one_probe_pass() -> None:
    breaker = opened()
    assert breaker.allows(FIRST_OPEN_S)
    breaker.request_sent(FIRST_OPEN_S)
    assert not breaker.allows(FIRST_OPEN_S)


def test_a_good_probe_closes_it() -> None:
    breaker = opened()
    breaker.request_sent(2.0)
    breaker.record_success(2.1, 2.0)
    assert breaker.closed
    assert breaker.allows(2.1)
    breaker.record_failure(2.2, 2.2)
    assert breaker.closed, "what was before the recovery no longer counts"


def test_a_bad_probe_doubles_the_pause() -> None:
    breaker = opened()
    breaker.request_sent(FIRST_OPEN_S)
    breaker.record_failure(FIRST_OPEN_S, FIRST_OPEN_S)
    assert not breaker.allows(2.9 * FIRST_OPEN_S)
    assert breaker.allows(3 * FIRST_OPEN_S)


def test_a_probe_that_tells_nothing_makes_room_for_another() -> None:
    breaker = opened()
    breaker.request_sent(2.0)
    breaker.release_probe()
    assert breaker.allows(2.0)


def test_a_lost_probe_does_not_close_the_endpoint_for_good() -> None:
    breaker = opened()
    breaker.request_sent(2.0)
    assert breaker.allows(2.0 + MAX_OPEN_S)


def test_requests_that_were_sent_before_it_opened_do_not_count_as_probes() -> None:
    breaker = opened()
    breaker.record_failure(0.5, 0.5)
    breaker.record_success(0.6, 0.6)
    assert not breaker.allows(0.9)
    assert breaker.allows(FIRST_OPEN_S)


def test_long_replies_from_before_do_not_speak_for_the_probe() -> None:
    breaker = opened()
    breaker.record_success(2.0, sent_at=-60.0)
    assert not breaker.closed
    breaker.record_failure(2.0, sent_at=-60.0)
    assert breaker.allows(2.0), "nor do they make the pause longer"
