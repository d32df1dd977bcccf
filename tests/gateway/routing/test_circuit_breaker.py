"""A failing endpoint is left alone, probed, and taken back."""

from __future__ import annotations

import pytest

from penstock.gateway.responses.outcome import Outcome
from penstock.gateway.routing.circuit_breaker import (
    CONSECUTIVE_FAILURES,
    FIRST_OPEN_S,
    LOST_PROBE_S,
    MAX_PROBES,
    MIN_REQUESTS,
    PROBE_GROWTH_S,
    WINDOW_S,
    CircuitBreaker,
)
from penstock.gateway.routing.failing_clients import FailingClients


def opened() -> CircuitBreaker:
    breaker = CircuitBreaker()
    for _ in range(CONSECUTIVE_FAILURES):
        assert breaker.allows(0.0)
        breaker.request_sent(0.0)
        breaker.record_unavailable(0.0, 0.0)
    return breaker


def test_failures_in_a_row_open_it() -> None:
    breaker = opened()
    assert not breaker.allows(0.0)
    assert not breaker.allows(FIRST_OPEN_S - 0.01)


def test_a_success_in_between_keeps_it_closed() -> None:
    breaker = CircuitBreaker()
    for _ in range(CONSECUTIVE_FAILURES - 1):
        breaker.record_unavailable(0.0, 0.0)
    breaker.record_success(0.0, 0.0)
    breaker.record_unavailable(0.0, 0.0)
    assert breaker.allows(0.0)


def test_many_failures_among_successes_open_it() -> None:
    breaker = CircuitBreaker()
    for _ in range(MIN_REQUESTS):
        breaker.record_unavailable(0.0, 0.0)
        breaker.record_success(0.0, -1.0)
    assert not breaker.closed


def test_old_failures_are_forgotten() -> None:
    breaker = CircuitBreaker()
    for _ in range(MIN_REQUESTS // 2 - 1):
        breaker.record_unavailable(0.0, 0.0)
        breaker.record_success(0.0, 0.0)
    breaker.record_unavailable(1000.0, 1000.0)
    assert breaker.closed


def test_half_open_lets_more_and_more_probes_pass() -> None:
    """A reply that is not streamed shows nothing until it is complete."""
    breaker = opened()
    begun, sent = FIRST_OPEN_S + 5.0, []
    for elapsed in range(100):
        while breaker.allows(begun + 0.1 * elapsed):
            breaker.request_sent(begun + 0.1 * elapsed)
            sent.append(elapsed)
    growth = int(10 * PROBE_GROWTH_S)
    assert [sum(at <= limit for at in sent) for limit in (0, growth - 1, growth, 2 * growth, 99)] == [
        1,
        1,
        2,
        4,
        MAX_PROBES,
    ]
    breaker.record_unavailable(begun + 10.0, begun)
    assert not breaker.allows(begun + 10.0), "one that fails ends it"


def test_the_first_token_of_a_probe_closes_it() -> None:
    breaker = opened()
    breaker.request_sent(FIRST_OPEN_S)
    breaker.record_success(1.3, FIRST_OPEN_S, "a")
    assert breaker.closed
    breaker.record_outcome(Outcome.OK, 45.0, FIRST_OPEN_S, "a", had_token=True)
    assert breaker.closed


def test_a_request_that_was_sent_while_it_is_open_may_close_it() -> None:
    """So is everything where too few endpoints are healthy."""
    breaker = opened()
    breaker.request_sent(0.1)
    breaker.record_success(0.4, 0.1)
    assert breaker.closed


def test_one_that_opens_soon_after_it_has_closed_stays_open_longer() -> None:
    breaker = opened()
    breaker.record_success(2.0, 1.5)
    for _ in range(CONSECUTIVE_FAILURES):
        breaker.record_unavailable(3.0, 3.0)
    assert not breaker.allows(3.0 + 1.9 * FIRST_OPEN_S)
    breaker.record_success(6.0, 5.5)
    for _ in range(CONSECUTIVE_FAILURES):
        breaker.record_unavailable(100.0, 100.0)
    assert breaker.allows(100.0 + FIRST_OPEN_S)


def test_a_connection_shows_that_what_was_away_is_back() -> None:
    breaker = opened()
    breaker.reached(0.5, began_at=-0.1)
    assert not breaker.allows(0.5), "it was made before"
    breaker.reached(0.5, began_at=0.4)
    assert breaker.allows(0.5)
    breaker.request_sent(0.5)
    assert not breaker.allows(0.5), "for a probe"
    avoided = errored()
    avoided.reached(0.5, began_at=0.4)
    assert not avoided.allows(0.5), "connections are not what it fails at"


def test_a_good_probe_closes_it() -> None:
    breaker = opened()
    breaker.request_sent(2.0)
    breaker.record_success(2.1, 2.0)
    assert breaker.closed
    assert breaker.allows(2.1)
    breaker.record_unavailable(2.2, 2.2)
    assert breaker.closed, "what was before the recovery no longer counts"


def test_a_bad_probe_doubles_the_pause() -> None:
    breaker = opened()
    breaker.request_sent(FIRST_OPEN_S)
    breaker.record_unavailable(FIRST_OPEN_S, FIRST_OPEN_S)
    assert not breaker.allows(2.9 * FIRST_OPEN_S)
    assert breaker.allows(3 * FIRST_OPEN_S)


def test_a_probe_that_tells_nothing_makes_room_for_another() -> None:
    breaker = opened()
    breaker.request_sent(2.0)
    breaker.release_probe(2.0)
    assert breaker.allows(2.0)


def test_a_lost_probe_does_not_close_the_endpoint_for_good() -> None:
    breaker = opened()
    breaker.request_sent(2.0)
    assert breaker.allows(2.0 + LOST_PROBE_S)


def test_requests_that_were_sent_before_it_opened_do_not_count_as_probes() -> None:
    breaker = opened()
    breaker.record_unavailable(0.5, 0.5)
    breaker.record_success(0.6, -0.5)
    assert not breaker.allows(0.9)
    assert breaker.allows(FIRST_OPEN_S)


def test_long_replies_from_before_do_not_speak_for_the_probe() -> None:
    breaker = opened()
    breaker.record_success(2.0, sent_at=-60.0)
    assert not breaker.closed
    breaker.record_unavailable(2.0, sent_at=-60.0)
    assert breaker.allows(2.0), "nor do they make the pause longer"


# -- failures after a connection


def test_errors_of_one_client_do_not_open_it_while_others_are_served() -> None:
    breaker = CircuitBreaker()
    breaker.record_success(0.0, 0.0, "good")
    for _ in range(100):
        breaker.record_failure(1.0, 1.0, "bad")
    assert breaker.closed
    breaker.record_failure(1.0, 1.0, "another")
    assert breaker.closed, "two clients neither"


def test_errors_of_three_clients_open_it() -> None:
    breaker = CircuitBreaker()
    breaker.record_success(0.0, 0.0, "good")
    for client in ("a", "b", "c"):
        breaker.record_failure(1.0, 1.0, client)
    assert not breaker.allows(1.0)
    assert breaker.avoids


@pytest.mark.parametrize("served_at", [None, -WINDOW_S])
def test_errors_of_the_only_client_open_it(served_at: float | None) -> None:
    """Nobody else was served lately."""
    breaker = CircuitBreaker()
    if served_at is not None:
        breaker.record_success(served_at, served_at, "good")
    breaker.record_success(0.0, 0.0, "only")
    for _ in range(CONSECUTIVE_FAILURES):
        assert breaker.allows(0.0)
        breaker.record_failure(0.0, 0.0, "only")
    assert not breaker.allows(0.0)
    assert breaker.avoids


def errored() -> CircuitBreaker:
    breaker = CircuitBreaker()
    for _ in range(CONSECUTIVE_FAILURES):
        breaker.record_failure(0.0, 0.0, "only")
    return breaker


def test_a_good_reply_closes_what_errors_have_opened() -> None:
    breaker = errored()
    breaker.record_success(0.2, -0.1, "other")
    assert not breaker.closed, "it was sent before"
    breaker.record_success(0.2, 0.1, "other")
    assert breaker.closed


def test_requests_sent_while_it_avoids_do_not_make_the_pause_longer() -> None:
    breaker = errored()
    for _ in range(10):
        breaker.request_sent(0.5)
        breaker.record_failure(0.6, 0.5, "only")
    assert breaker.allows(FIRST_OPEN_S)


def test_faults_close_an_endpoint_that_is_only_avoided() -> None:
    breaker = errored()
    for _ in range(CONSECUTIVE_FAILURES):
        breaker.record_unavailable(0.5, 0.5)
    assert not breaker.avoids
    assert not breaker.allows(0.6)


def test_a_probe_that_is_answered_with_an_error_is_avoided() -> None:
    breaker = opened()
    breaker.request_sent(FIRST_OPEN_S)
    breaker.record_failure(FIRST_OPEN_S, FIRST_OPEN_S, "a")
    assert breaker.avoids, "it is there"


def test_4xx_is_neither_a_failure_nor_a_success() -> None:
    breaker = CircuitBreaker()
    for _ in range(CONSECUTIVE_FAILURES):
        breaker.record_outcome(Outcome.CLIENT_ERROR, 0.0, 0.0, "a")
        breaker.record_outcome(Outcome.MODEL_SERVER_ERROR, 0.0, 0.0, "a")
    assert breaker.avoids
    breaker.request_sent(FIRST_OPEN_S)
    breaker.record_outcome(Outcome.CLIENT_ERROR, FIRST_OPEN_S, FIRST_OPEN_S, "a")
    assert breaker.avoids
    assert breaker.allows(FIRST_OPEN_S), "the next request is the probe"
    breaker = opened()
    breaker.request_sent(FIRST_OPEN_S)
    breaker.record_outcome(Outcome.CLIENT_ERROR, FIRST_OPEN_S, FIRST_OPEN_S, "a")
    assert breaker.closed, "it can be reached again"


@pytest.mark.parametrize("served", [False, True], ids=["alone", "beside others"])
def test_a_client_that_breaks_one_server_takes_no_second_one_out(served: bool) -> None:
    clients = FailingClients()
    first, second = CircuitBreaker(clients), CircuitBreaker(clients)
    if served:
        first.record_success(0.0, 0.0, "good")
        second.record_success(0.0, 0.0, "good")
    for number in range(100):
        for breaker in (first, second):
            breaker.record_outcome(Outcome.NETWORK_ERROR, 0.01 * number, 0.01 * number, "bad")
    assert first.closed == served
    assert second.closed
    second.record_success(2.0, 2.0, "bad")
    for _ in range(CONSECUTIVE_FAILURES):
        second.record_failure(2.0 + WINDOW_S, 2.0 + WINDOW_S, "bad")
    assert not second.closed, "it serves the client elsewhere"


def test_a_server_that_fails_three_clients_is_taken_out_wherever_else_they_fail() -> None:
    clients = FailingClients()
    first, second = CircuitBreaker(clients), CircuitBreaker(clients)
    for client in "abc":
        first.record_failure(0.0, 0.0, client)
        assert second.closed
    for client in "abcabc":
        second.record_failure(0.0, 0.0, client)
    assert not second.closed


def test_a_server_that_is_gone_is_held_responsible_for_nothing() -> None:
    clients = FailingClients()
    first, second = CircuitBreaker(clients), CircuitBreaker(clients)
    first.record_failure(0.0, 0.0, "a")
    clients.forget(first)
    for _ in range(CONSECUTIVE_FAILURES):
        second.record_failure(0.0, 0.0, "a")
    assert not second.closed


def test_it_remembers_few_clients() -> None:
    breaker = CircuitBreaker()
    for number in range(1000):
        breaker.record_success(0.0, 0.0, f"good {number}")
        breaker.record_failure(0.0, 0.0, f"bad {number}")
    assert len(breaker._served) + len(breaker._failed) < 20
