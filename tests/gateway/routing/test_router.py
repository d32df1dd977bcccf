"""Decisions for requests whose endpoints change while they are under way."""

from __future__ import annotations

from unittest import mock

from msgspec.structs import replace

from penstock.gateway.admission.admission import Permit
from penstock.gateway.admission.flow_control import FlowRequest
from penstock.gateway.routing.endpoint import Endpoint, EndpointLoad
from penstock.gateway.routing.endpoint_capacity import EndpointCapacity
from penstock.gateway.routing.endpoint_discovery import ResolvedEndpoint
from penstock.gateway.routing.endpoint_pool import EndpointPool
from penstock.gateway.routing.model_steps import FallbackStep
from penstock.gateway.routing.pick_request import PickRequest, pick_request
from penstock.gateway.routing.picker import Picker
from penstock.gateway.routing.router import Router
from penstock.gateway.upstream.upstream import Upstream
from tests.gateway.routers import INCOMING, router_over

NOW = 100.0


def router(*names: str) -> Router:
    pool = EndpointPool(Upstream(), lambda endpoint: made.forget(endpoint))
    pool.update(ResolvedEndpoint(f"http://{name}:1") for name in names)
    made = router_over(pool, Picker({"running": 1.0}), lambda: NOW)
    return made


def request_at(router: Router) -> PickRequest:
    return PickRequest(
        blocks=[1], session="s", steps=(router.models.any_model,), client="c", incoming=INCOMING
    )


def test_an_endpoint_that_has_left_is_not_picked_for_requests_that_began_before() -> None:
    routing = router("a", "b")
    request, (gone, stays) = request_at(routing), routing.pool.endpoints
    routing.pool.update([ResolvedEndpoint("http://b:1")])
    for _ in range(20):
        assert routing.pick(request) is stays
    assert not gone.is_ready(NOW)


def test_nothing_is_kept_of_endpoints_that_have_left() -> None:
    """Requests that began before, and other workers, may speak of them later."""
    routing = router("a")
    columns, owners = routing.picker._columns, routing.owners
    for number in range(100):
        (gone,), request = routing.pool.endpoints, request_at(routing)
        routing.pick(request)
        routing.pool.update([ResolvedEndpoint(f"http://{number}:1")])
        routing.models.directory.update(routing.pool.endpoints)  # type: ignore[attr-defined]
        routing.has_candidate(request, NOW)
        routing.picker.learn(gone, [1, 2], 3)
        owners.learn(f"response {number}", gone)
        owners.learn(f"response {number}", gone, reported=True)
    left: list[Endpoint | None] = routing.pool.endpoints
    assert [each for each in columns.endpoints if each not in (None, *left)] == []
    assert columns.size < 4
    assert not any(owners.of(f"response {number}") for number in range(100))


def test_only_the_endpoint_that_gets_a_request_is_remembered_for_it() -> None:
    """With flow control the first choice may be full."""
    routing = router("a", "b")
    routing.capacity = EndpointCapacity(1)
    full, free = routing.pool.endpoints
    routing.picker = Picker({"session": 1.0, "prefix": 1.0})
    routing.picker.learn(full, [1], hash("s"))
    full.request_sent(1, NOW)
    told: list[Endpoint] = []
    routing.picker.on_pick = lambda endpoint, blocks, session: told.append(endpoint)
    request = request_at(routing)
    request.permit = Permit(1, 1, flow=FlowRequest("f"))
    request.blocks = [1, 2]
    assert routing.pick(request) is free
    assert told == [free]
    assert routing.picker.index.matched([1, 2], [full, free]) == [1, 2]


def test_asking_where_a_prompt_was_sent_keeps_nothing() -> None:
    routing = router("a")
    (gone,) = routing.pool.endpoints
    routing.picker.learn(gone, [1], None)
    routing.pool.update([ResolvedEndpoint("http://b:1")])
    assert routing.picker.index.matched([1], [gone, *routing.pool.endpoints]) == [0, 0]
    assert gone not in routing.picker._columns.endpoints


def busy(endpoint: Endpoint, waiting: int) -> None:
    endpoint.scrape_succeeded(EndpointLoad(waiting=waiting), NOW)


def test_a_step_overflows_when_each_of_its_endpoints_has_a_queue() -> None:
    routing = router("a", "b", "c", "d")
    a, b, c, d = routing.pool.endpoints
    steps = (
        FallbackStep("m", (a, b), overflow=4),
        FallbackStep("n", (c,), overflow=4),
        FallbackStep("o", (d,)),
    )

    def models(queued: float = 0.0) -> list[str]:
        admission = routing.admission
        routing.admission = mock.Mock(queued=lambda key: queued)
        request = pick_request(replace(INCOMING, model="m"), None, steps, None)
        routing._overflow(request)
        routing.admission = admission
        return [step.model for step in request.steps]

    busy(a, 5)
    busy(b, 4)
    assert models() == ["m", "n", "o"]
    assert models(queued=2.0) == ["n", "o", "m"], "two in the gateway are one for each"
    b.request_sent(1, NOW)
    assert models() == ["n", "o", "m"], "what was sent to a server with a queue waits as well"
    busy(c, 5)
    assert models() == ["o", "m", "n"]
    for _ in range(3):
        d.breaker.record_unavailable(NOW, NOW)
    assert models() == ["m", "n", "o"], "nobody else takes it"


def test_a_drained_endpoint_is_in_no_list_for_envoy_though_all_others_fail() -> None:
    routing = router("a", "b")
    drained, other = routing.pool.endpoints
    for endpoint in routing.pool.endpoints:
        endpoint.destination = "10.0.0.1:1"
    assert set(routing.ranked(request_at(routing), 8)) == {drained, other}
    drained.drained = True
    other.breaker.open_as_reported(NOW, NOW + 5.0, avoids=True)
    assert routing.ranked(request_at(routing), 8) == [other]
    drained.drained = False
    assert drained in routing.ranked(request_at(routing), 8)
