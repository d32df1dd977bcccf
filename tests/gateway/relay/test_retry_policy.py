"""When a request that failed at one endpoint is sent to another one."""

from __future__ import annotations

import pytest

from penstock.gateway.relay.retry_budget import BUCKET_SIZE, MIN_RETRIES_PER_S
from penstock.gateway.relay.retry_policy import MAX_REFUSALS, AttemptProgress, RetryPolicy, progress_of
from penstock.gateway.requests.incoming_request import IncomingRequest
from penstock.gateway.routing.endpoint import Endpoint, EndpointLoad
from penstock.gateway.routing.endpoint_discovery import ResolvedEndpoint
from penstock.gateway.routing.endpoint_pool import EndpointPool
from penstock.gateway.routing.model_steps import FallbackStep
from penstock.gateway.routing.pick_request import PickRequest
from penstock.gateway.routing.picker import Picker
from penstock.gateway.upstream.upstream import Upstream
from penstock.http.admission import BEGUN
from tests.gateway.routers import INCOMING, router_over

NOW = 100.0


def incoming(method: str = "POST", path: str = "/v1/completions") -> IncomingRequest:
    return IncomingRequest(method=method, target=path.encode(), path=path, headers=[], raw=b"", body=None)


GET, COMPLETION, EMBEDDING = incoming("GET"), incoming(), incoming(path="/v1/embeddings")


def policy_after_failure(priority: int = 0) -> tuple[RetryPolicy, PickRequest, Endpoint]:
    """A request that failed at the first of two endpoints, and the other endpoint."""
    pool = EndpointPool(Upstream(), lambda endpoint: None)
    pool.update([ResolvedEndpoint("http://a:1"), ResolvedEndpoint("http://b:1")])
    failed, other = pool.endpoints
    policy = RetryPolicy(router_over(pool, Picker({}), lambda: NOW))
    steps = (policy.router.models.any_model,)
    return policy, PickRequest(priority=priority, tried={failed}, steps=steps, incoming=INCOMING), other


@pytest.mark.parametrize(
    ("request_", "allowed"),
    [
        (GET, {AttemptProgress.NOT_BEGUN, AttemptProgress.REFUSED, AttemptProgress.BEGUN}),
        (incoming("HEAD"), {AttemptProgress.NOT_BEGUN, AttemptProgress.REFUSED, AttemptProgress.BEGUN}),
        (COMPLETION, {AttemptProgress.NOT_BEGUN, AttemptProgress.REFUSED}),
        (EMBEDDING, {AttemptProgress.NOT_BEGUN, AttemptProgress.REFUSED, AttemptProgress.BEGUN}),
        (incoming(path="/v1/images/edits"), {AttemptProgress.NOT_BEGUN, AttemptProgress.REFUSED}),
        (incoming(path="/v1/files"), {AttemptProgress.NOT_BEGUN}),
        (incoming(path="/v1/batches/b/cancel"), {AttemptProgress.NOT_BEGUN}),
        (incoming("DELETE", "/v1/responses/r"), {AttemptProgress.NOT_BEGUN}),
    ],
    ids=["GET", "HEAD", "completion", "embedding", "image", "file", "batch", "DELETE"],
)
def test_only_what_is_safe_is_sent_again(request_: IncomingRequest, allowed: set[AttemptProgress]) -> None:
    found = set()
    for progress in AttemptProgress:
        policy, request, _ = policy_after_failure()
        if policy.claim(progress, request_, request, NOW):
            found.add(progress)
    assert found == allowed


@pytest.mark.parametrize(
    ("status", "headers", "progress"),
    [
        (429, [], AttemptProgress.REFUSED),
        (503, [], AttemptProgress.REFUSED),
        (529, [], AttemptProgress.REFUSED),
        (508, [], AttemptProgress.REFUSED),
        (503, [BEGUN], AttemptProgress.BEGUN),
        (502, [], AttemptProgress.BEGUN),
        (200, [], None),
        (400, [], None),
        (500, [], None),
        (504, [], None),
    ],
)
def test_what_a_status_says(
    status: int, headers: list[tuple[bytes, bytes]], progress: AttemptProgress | None
) -> None:
    assert progress_of(status, headers) is progress


def test_requests_that_fail_at_once_share_the_budget() -> None:
    policy, request, _ = policy_after_failure()
    claimed = sum(policy.claim(AttemptProgress.BEGUN, GET, request, NOW) for _ in range(int(3 * BUCKET_SIZE)))
    assert claimed == BUCKET_SIZE
    assert policy.claim(AttemptProgress.BEGUN, GET, request, NOW + 1 / MIN_RETRIES_PER_S)
    assert not policy.claim(AttemptProgress.BEGUN, GET, request, NOW + 1 / MIN_RETRIES_PER_S)


def test_what_no_endpoint_has_begun_needs_no_budget() -> None:
    policy, request, other = policy_after_failure()
    for _ in range(int(3 * BUCKET_SIZE)):
        policy.claim(AttemptProgress.BEGUN, GET, request, NOW)
    for _ in range(int(3 * BUCKET_SIZE)):
        assert policy.claim(AttemptProgress.NOT_BEGUN, COMPLETION, request, NOW)
        fresh = PickRequest(tried={other}, steps=request.steps, incoming=INCOMING)
        assert policy.claim(AttemptProgress.REFUSED, COMPLETION, fresh, NOW)


def test_resends_share_the_budget_but_need_no_other_endpoint() -> None:
    policy, request, other = policy_after_failure()
    request.tried.add(other)
    assert not policy.claim(AttemptProgress.BEGUN, GET, request, NOW)
    assert sum(policy.claim_resend(GET, request, NOW) for _ in range(int(3 * BUCKET_SIZE))) == BUCKET_SIZE
    assert not policy_after_failure()[0].claim_resend(COMPLETION, request, NOW)


def test_what_may_have_broken_two_endpoints_is_sent_to_no_third() -> None:
    policy, request, _ = policy_after_failure()
    assert policy.claim(AttemptProgress.NOT_BEGUN, EMBEDDING, request, NOW)
    assert policy.claim(AttemptProgress.BEGUN, EMBEDDING, request, NOW)
    assert not policy.claim(AttemptProgress.BEGUN, EMBEDDING, request, NOW)
    assert policy.claim(AttemptProgress.NOT_BEGUN, EMBEDDING, request, NOW)


def test_attempts_are_limited() -> None:
    policy, request, _ = policy_after_failure()
    request.tried |= {Endpoint(f"http://gone-{n}") for n in range(Upstream().max_attempts - 1)}
    assert not policy.claim(AttemptProgress.NOT_BEGUN, GET, request, NOW)
    assert not policy.claim(AttemptProgress.BEGUN, GET, request, NOW)


def test_refusals_are_limited_apart() -> None:
    policy, request, _ = policy_after_failure()
    for number in range(MAX_REFUSALS):
        assert policy.claim(AttemptProgress.REFUSED, COMPLETION, request, NOW)
        request.tried.add(Endpoint(f"http://full-{number}"))
    assert not policy.claim(AttemptProgress.REFUSED, COMPLETION, request, NOW)
    assert policy.claim(AttemptProgress.NOT_BEGUN, COMPLETION, request, NOW)


def test_without_another_endpoint_there_is_no_retry() -> None:
    policy, request, other = policy_after_failure()
    request.tried.add(other)
    assert not policy.claim(AttemptProgress.NOT_BEGUN, GET, request, NOW)


def test_an_endpoint_without_a_connection_is_none() -> None:
    policy, request, other = policy_after_failure()
    other.scrape_failed(connected=False)
    other.scrape_failed(connected=False)
    assert not policy.claim(AttemptProgress.NOT_BEGUN, GET, request, NOW)


def test_nor_is_one_that_wants_no_requests() -> None:
    policy, request, other = policy_after_failure()
    other.backoff.refused(503, 5.0, "c", NOW)
    assert not policy.claim(AttemptProgress.REFUSED, COMPLETION, request, NOW)
    assert policy.claim(AttemptProgress.REFUSED, COMPLETION, request, NOW + 5.0)


def test_an_endpoint_that_cannot_be_scraped_is_one() -> None:
    policy, request, other = policy_after_failure()
    other.scrape_failed()
    other.scrape_failed()
    assert policy.claim(AttemptProgress.NOT_BEGUN, GET, request, NOW), "only what fails requests is taken out"


@pytest.mark.parametrize(("priority", "allowed"), [(0, True), (-1, False)])
def test_a_saturated_endpoint_takes_no_request_of_low_priority(priority: int, allowed: bool) -> None:
    policy, request, other = policy_after_failure(priority)
    other.scrape_succeeded(EndpointLoad(waiting=1000), NOW)
    assert policy.claim(AttemptProgress.NOT_BEGUN, GET, request, NOW) is allowed


def test_another_model_takes_its_place_when_attempts_are_spent() -> None:
    policy, request, other = policy_after_failure()
    spare = Endpoint("http://spare")
    request.steps = (*request.steps, FallbackStep("down", ()), FallbackStep("spare", (spare,)))
    request.tried.add(other)
    assert not policy.claim(AttemptProgress.BEGUN, COMPLETION, request, NOW), "it may have run"
    assert policy.claim(AttemptProgress.REFUSED, COMPLETION, request, NOW)
    assert (request.steps[0].model, request.tried, request.refusals) == ("spare", set(), 0)
    assert policy.router.pick(request) is spare
    request.tried.add(spare)
    assert not policy.claim(AttemptProgress.REFUSED, COMPLETION, request, NOW)
