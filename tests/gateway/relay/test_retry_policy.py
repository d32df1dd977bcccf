"""When a request that failed at one endpoint is sent to another one."""

from __future__ import annotations

import pytest

from penstock.gateway.relay.retry_budget import BUCKET_SIZE, MIN_RETRIES_PER_S
from penstock.gateway.relay.retry_policy import RetryPolicy
from penstock.gateway.routing.circuit_breaker import CONSECUTIVE_FAILURES
from penstock.gateway.routing.endpoint import Endpoint, EndpointLoad
from penstock.gateway.routing.endpoint_discovery import ResolvedEndpoint
from penstock.gateway.routing.endpoint_pool import EndpointPool
from penstock.gateway.routing.picker import Picker, PickRequest
from penstock.gateway.upstream.timeouts import Timeouts

NOW = 100.0


def policy_after_failure(priority: int = 0) -> tuple[RetryPolicy, PickRequest, Endpoint]:
    """A request that failed at the first of two endpoints, and the other endpoint."""
    pool = EndpointPool(Timeouts(), lambda endpoint: None)
    pool.update([ResolvedEndpoint("http://a:1"), ResolvedEndpoint("http://b:1")])
    failed, other = pool.endpoints
    return RetryPolicy(pool, Picker({})), PickRequest(priority=priority, tried={failed}), other


def test_asking_spends_nothing() -> None:
    policy, request, _ = policy_after_failure()
    for _ in range(int(2 * BUCKET_SIZE)):
        assert policy.allows(request, NOW)


def test_requests_that_fail_at_once_share_the_budget() -> None:
    policy, request, _ = policy_after_failure()
    claimed = sum(policy.claim(request, NOW) for _ in range(int(3 * BUCKET_SIZE)))
    assert claimed == BUCKET_SIZE
    assert policy.claim(request, NOW + 1 / MIN_RETRIES_PER_S)
    assert not policy.claim(request, NOW + 1 / MIN_RETRIES_PER_S)


def test_resends_share_the_budget_but_need_no_other_endpoint() -> None:
    policy, request, other = policy_after_failure()
    request.tried.add(other)
    assert not policy.allows(request, NOW)
    assert sum(policy.claim_resend(NOW) for _ in range(int(3 * BUCKET_SIZE))) == BUCKET_SIZE


def test_attempts_are_limited() -> None:
    policy, request, _ = policy_after_failure()
    request.tried |= {Endpoint(f"http://gone-{n}") for n in range(policy.max_attempts - 1)}
    assert not policy.allows(request, NOW)


def test_without_another_endpoint_there_is_no_retry() -> None:
    policy, request, other = policy_after_failure()
    request.tried.add(other)
    assert not policy.allows(request, NOW)


def test_an_endpoint_with_an_open_breaker_is_none() -> None:
    policy, request, other = policy_after_failure()
    for _ in range(CONSECUTIVE_FAILURES):
        other.breaker.record_fault(NOW, NOW)
    assert not policy.allows(request, NOW)


def test_an_endpoint_that_cannot_be_scraped_is_one() -> None:
    policy, request, other = policy_after_failure()
    other.scrape_failed()
    other.scrape_failed()
    assert policy.allows(request, NOW), "only what fails requests is taken out"


@pytest.mark.parametrize(("priority", "allowed"), [(0, True), (-1, False)])
def test_a_saturated_endpoint_takes_no_request_of_low_priority(priority: int, allowed: bool) -> None:
    policy, request, other = policy_after_failure(priority)
    other.scrape_succeeded(EndpointLoad(waiting=1000), NOW)
    assert policy.allows(request, NOW) is allowed
