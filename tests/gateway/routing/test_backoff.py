"""Endpoints that have said when to come back."""

from __future__ import annotations

import pytest

from penstock.gateway.routing.backoff import MAX_BACKOFF_S, MAX_CLIENTS, Backoff, read_retry_after
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.upstream.exchange import Headers

EPOCH = 1_700_000_000.0
"""Tuesday, 14 November 2023, 22:13:20."""


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ([], None),
        ([(b"retry-after", b"7")], 7.0),
        ([(b"retry-after", b"0")], None),
        ([(b"retry-after", b"0.5")], 0.5),
        ([(b"retry-after", b"7"), (b"retry-after-ms", b"1500")], 1.5),
        ([(b"retry-after-ms", b"soon"), (b"retry-after", b"2")], 2.0),
        ([(b"retry-after", b"Tue, 14 Nov 2023 22:13:50 GMT")], 30.0),
        ([(b"retry-after", b"Tue, 14 Nov 2023 22:13:00 GMT")], None),
        ([(b"retry-after", b"Tue, 14 Nov 0000 99:13:00 GMT")], None),
        ([(b"retry-after", b"-3")], None),
        ([(b"retry-after", b"nan")], None),
        ([(b"retry-after", b"inf")], None),
        ([(b"retry-after", b"tomorrow")], None),
        ([(b"retry-after", b"\xff")], None),
    ],
)
def test_ways_to_say_when(headers: Headers, seconds: float | None) -> None:
    assert read_retry_after(headers, EPOCH) == seconds


@pytest.mark.parametrize("status", [503, 529])
def test_overload_holds_for_everyone_and_not_for_long(status: int) -> None:
    backoff = Backoff()
    backoff.refused(status, 3600.0, "a", 10.0)
    assert backoff.status == 503, "which clients know"
    assert backoff.until_for("a", "m") == backoff.until_for("b", "m") == 10.0 + MAX_BACKOFF_S


def test_429_holds_for_one_client_until_another_gets_one() -> None:
    """It may be that client's own limit."""
    backoff = Backoff()
    backoff.refused(429, 5.0, "a", 10.0)
    backoff.refused(429, 2.0, "a", 10.0)
    assert (backoff.until_for("a", "m"), backoff.until_for("b", "m")) == (15.0, 0.0)
    backoff.refused(429, 1.0, "b", 16.0)
    assert backoff.until_for("a", "m") <= 16.0, "that one is over"
    backoff.refused(429, 2.0, "a", 16.5)
    assert backoff.until_for("a", "m") == backoff.until_for("b", "m") == backoff.until_for("c", "m") == 18.5


def test_429_of_a_server_with_several_models_is_about_one_of_them() -> None:
    """Its models may run at other providers, each with its own limit."""
    endpoint = Endpoint("http://e", several_models=True)
    endpoint.refused(429, 5.0, "a", "m", 10.0)
    backoff = endpoint.backoff
    assert (backoff.until_for("a", "m"), backoff.until_for("a", "n"), backoff.until_for("b", "m")) == (
        15.0,
        0.0,
        0.0,
    )
    endpoint.refused(429, 7.0, "b", "m", 10.0)
    assert backoff.until_for("c", "m") == 17.0, "for everyone who asks for the model"
    assert backoff.until_for("b", "n") == backoff.until == 0.0
    endpoint.refused(503, 2.0, "c", "n", 20.0)
    assert backoff.until_for("d", "o") == 22.0, "it is about the server"


def test_memory_is_bounded() -> None:
    backoff = Backoff()
    for number in range(1000):
        backoff.refused(429, 60.0, f"client {number}", float(number))
        assert len(backoff.clients) <= MAX_CLIENTS
