"""Models, pools and fallbacks hold for what Envoy relays as for the gateway's own clients."""

from __future__ import annotations

import json

import pytest

from penstock.gateway.extproc.messages import (
    CommonResponse,
    ImmediateResponse,
    MessagePart,
    ProcessingRequest,
)
from penstock.gateway.models.learner import ModelLearner
from penstock.gateway.models.model_routes import read_routes
from penstock.gateway.models.shadows import shadow_of
from penstock.gateway.routing.pick_request import PickRequest
from tests.gateway.extproc.test_processor_stream import Stream, World, body, head


def world_of(
    *models: str, fallbacks: tuple[str, ...] = (), shadows: tuple[str, ...] = ()
) -> tuple[World, ModelLearner]:
    """Two endpoints, each of which lists one of ``models``."""
    world = World()
    learner = world.requests.relay.router.models
    assert isinstance(learner, ModelLearner)
    learner.directory.update(world.endpoints, routes=read_routes((), fallbacks, shadows))
    for endpoint, model in zip(world.endpoints, models, strict=True):
        learner.directory.learn(endpoint, {model: {"id": model}})
    return world, learner


def destinations(world: World, model: str) -> tuple[str, CommonResponse]:
    exchange = Stream(world.requests)
    exchange.receive(head())
    (reply,) = exchange.receive(body(json.dumps({"model": model, "prompt": "p"}).encode()))
    assert isinstance(reply, CommonResponse)
    return dict(reply.set_headers)[b"x-gateway-destination-endpoint"].decode(), reply


def test_envoy_gets_the_endpoints_of_the_model() -> None:
    world, _ = world_of("m", "n")
    assert destinations(world, "m")[0] == "10.0.0.1:8000"
    assert destinations(world, "n")[0] == "10.0.0.2:8000", "though it has more to do"
    exchange = Stream(world.requests)
    exchange.receive(head())
    (reply,) = exchange.receive(body(b'{"model":"unheard","prompt":"p"}'))
    assert isinstance(reply, ImmediateResponse)
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("connected", [False, True], ids=["no connection", "it answers 503"])
def test_a_pick_falls_back(connected: bool) -> None:
    world, _ = world_of("m", "n", fallbacks=("m=n",))
    for _ in range(3):
        world.endpoints[0].breaker.record_unavailable(world.now, world.now, connected=connected)
    destination, reply = destinations(world, "m")
    assert destination == "10.0.0.2:8000"
    assert reply.body is not None
    assert json.loads(reply.body)["model"] == "n"
    world.now += 60.0
    assert destinations(world, "m")[0] == "10.0.0.1:8000", "a request tests whether it is back"


def test_envoy_gets_the_listing() -> None:
    world, _ = world_of("m", "n")
    exchange = Stream(world.requests)
    headers = [(b":method", b"GET"), (b":path", b"/v1/models"), (b"x-request-id", b"r")]
    told = head(end=True)
    (reply,) = exchange.receive(ProcessingRequest(MessagePart.REQUEST_HEADERS, headers, end=True,
        request_mode=told.request_mode, response_mode=told.response_mode))  # fmt: skip
    assert isinstance(reply, ImmediateResponse)
    assert (reply.status, [card["id"] for card in json.loads(reply.body)["data"]]) == (200, ["m", "n"])
    assert world.counts() == {"ok": 1}


class Copies(list[tuple[str, str]]):
    """In the place of shadows: model and shadow of each copy that is due."""

    def __init__(self, learner: ModelLearner) -> None:
        self._directory = learner.directory

    def copy(self, asked: str, session: str | None, request: PickRequest) -> None:
        if (shadow := shadow_of(self._directory, asked, request)) is not None:
            self.append((request.model, shadow[0]))


def test_a_shadow_that_stands_in_gets_no_copy() -> None:
    world, learner = world_of("m", "n", fallbacks=("m=n",), shadows=("m=n:1",))
    copies = Copies(learner)
    learner.shadows = copies  # type: ignore[assignment]
    assert destinations(world, "m")[0] == "10.0.0.1:8000"
    assert copies == [("m", "n")]
    for _ in range(3):
        world.endpoints[0].breaker.record_unavailable(world.now, world.now)
    assert destinations(world, "m")[0] == "10.0.0.2:8000"
    assert copies == [("m", "n")]
