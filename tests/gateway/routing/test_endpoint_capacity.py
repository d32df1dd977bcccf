"""Free places of endpoints: fixed, and learned from scrapes."""

from __future__ import annotations

import pytest

from penstock.gateway.routing.endpoint import STALE_S, Endpoint, EndpointLoad
from penstock.gateway.routing.endpoint_capacity import FIRST_LIMIT, UNLIMITED, EndpointCapacity


def places(fixed: int | None = None, *, scraping: bool = True) -> EndpointCapacity:
    return EndpointCapacity(fixed, most_waiting=5, most_kv_used=0.95, scraping=scraping)


def send(endpoint: Endpoint, count: int) -> None:
    for _ in range(count):
        endpoint.request_sent(1, 0.0)


def end(endpoint: Endpoint, count: int) -> None:
    for _ in range(count):
        endpoint.request_ended(1)


def test_a_fixed_limit() -> None:
    endpoint, counted = Endpoint("http://a"), places(2)
    assert counted.free(endpoint, 0.0) == 2
    send(endpoint, 2)
    assert counted.free(endpoint, 0.0) == 0
    endpoint.scrape_succeeded(EndpointLoad(running=9), 1.0)  # requests of others
    assert counted.free(endpoint, 1.0) == -7


def test_without_scrapes_or_a_load_there_is_no_limit() -> None:
    endpoint = Endpoint("http://a")
    assert places(scraping=False).free(endpoint, 0.0) == UNLIMITED
    assert places().free(endpoint, 0.0) == FIRST_LIMIT
    endpoint.scrape_had_no_load()
    assert places().free(endpoint, 0.0) == UNLIMITED


def test_the_limit_doubles_until_the_server_has_a_queue() -> None:
    endpoint, counted = Endpoint("http://a"), places()
    send(endpoint, FIRST_LIMIT)
    endpoint.scrape_succeeded(EndpointLoad(running=FIRST_LIMIT), 1.0)
    assert counted.free(endpoint, 1.0) == FIRST_LIMIT
    send(endpoint, FIRST_LIMIT)
    assert counted.free(endpoint, 1.0) == 0
    endpoint.scrape_succeeded(EndpointLoad(running=100, waiting=28), 2.0)
    assert counted.free(endpoint, 2.0) == 100 + 5 - 128
    end(endpoint, 28)  # 100 are left; 72 run, and 28 of those that waited
    endpoint.scrape_succeeded(EndpointLoad(running=100), 3.0)
    assert counted.free(endpoint, 3.0) == 105 + 105 // 16 - 100


def test_a_limit_grows_only_where_it_is_used() -> None:
    endpoint, counted = Endpoint("http://a"), places()
    endpoint.scrape_succeeded(EndpointLoad(running=FIRST_LIMIT // 4), 1.0)
    assert counted.free(endpoint, 1.0) == FIRST_LIMIT - FIRST_LIMIT // 4


def test_requests_that_ended_since_the_scrape_leave_places() -> None:
    endpoint, counted = Endpoint("http://a"), places(10)
    send(endpoint, 8)
    endpoint.scrape_succeeded(EndpointLoad(running=10), 1.0)  # 2 of another gateway
    assert counted.free(endpoint, 1.0) == 0
    end(endpoint, 3)
    assert counted.free(endpoint, 1.0) == 3


def test_requests_that_ended_before_anybody_asked_leave_places() -> None:
    """Nothing asks for places between a scrape and the end of the requests in it."""
    endpoint, counted = Endpoint("http://a"), places(8)
    send(endpoint, 8)
    endpoint.scrape_succeeded(EndpointLoad(running=8), 1.0)
    end(endpoint, 8)
    assert counted.free(endpoint, 1.0) == 8


def test_an_endpoint_that_wants_no_requests_has_no_place() -> None:
    endpoint, counted = Endpoint("http://a"), places(8)
    endpoint.backoff.refused(503, 2.0, "client", 1.0)
    assert [counted.free(endpoint, now) for now in (2.9, 3.0)] == [0, 8]


def test_a_full_kv_cache_leaves_no_place() -> None:
    endpoint, counted = Endpoint("http://a"), places()
    endpoint.scrape_succeeded(EndpointLoad(running=3, kv_used=0.96), 1.0)
    assert counted.free(endpoint, 1.0) == 0
    endpoint.scrape_succeeded(EndpointLoad(kv_used=0.96), 2.0)
    assert counted.free(endpoint, 2.0) == FIRST_LIMIT


@pytest.mark.parametrize("forgotten", [False, True])
def test_what_was_learned_stays_while_scrapes_fail(forgotten: bool) -> None:
    """A busy server may be slow to answer them."""
    endpoint, counted = Endpoint("http://a"), places()
    endpoint.scrape_succeeded(EndpointLoad(running=3, waiting=9), 1.0)
    assert counted.free(endpoint, 1.0) == 3 + 5 - 12
    if forgotten:
        counted.forget(endpoint)
    assert counted.free(endpoint, 2.0 + STALE_S) == (FIRST_LIMIT if forgotten else 8)
