"""The gateway's own errors have the shape that the client's API has; requests around messages are relayed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateway.behaviours import good
from tests.gateway.processes import Gateway, Upstream, closed_port, eventually, gateway

KEY = {"x-api-key": "sk-right"}
VERSION = {"anthropic-version": "2023-06-01"}


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    with Upstream(good) as server:
        yield server


@pytest.fixture(scope="module")
def front(upstream: Upstream) -> Iterator[Gateway]:
    with gateway(upstream, options=("--api-key", "sk-right", "--max-request-bytes", "10000")) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "headers", "body", "status", "kind"),
    [
        ("/v1/messages", {}, b"{}", 401, "authentication_error"),
        ("/v1/messages?beta=true", {"x-api-key": "wrong"}, b"{}", 401, "authentication_error"),
        ("/v1/messages", KEY, b"{", 400, "invalid_request_error"),
        ("/v1/messages", KEY, b"x" * 10_001, 413, "request_too_large"),
        ("/sleep", {**KEY, **VERSION}, b"", 403, "permission_error"),
    ],
)
def test_refusals(
    front: Gateway, path: str, headers: dict[str, str], body: bytes, status: int, kind: str
) -> None:
    reply = front.client.post(path, headers={**headers, "x-request-id": "r1"}, content=body)
    error = reply.json()
    assert (reply.status_code, error["type"], error["error"]["type"]) == (status, "error", kind)
    assert error["request_id"] == "r1"
    assert error["error"]["message"]


def test_other_apis_keep_their_shape(front: Gateway) -> None:
    reply = front.client.post("/v1/responses", content=b"{}")
    assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    assert "type" not in reply.json()


def test_no_model_server() -> None:
    with gateway(closed_port()) as front:
        reply = front.client.post("/v1/messages", json={"model": "m", "messages": []})
        assert reply.status_code == 502
        assert reply.json()["type"] == "error"
        assert reply.json()["error"]["type"] == "api_error"


@pytest.mark.parametrize("headers", [KEY, {"authorization": "Bearer sk-right"}, {}])
def test_the_first_thing_that_claude_code_asks(
    front: Gateway, upstream: Upstream, headers: dict[str, str]
) -> None:
    before = len(upstream.calls)
    reply = front.client.head("/", headers=headers)
    assert (reply.status_code, reply.content) == (200, b"")
    assert before == len(upstream.calls)


def test_counting_tokens_is_no_generation() -> None:
    with Upstream(lambda call: call.reply(200, b'{"input_tokens":5}')) as server, gateway(server) as front:
        for path in ("/v1/messages/count_tokens", "/v1/responses/input_tokens"):
            reply = front.client.post(path, json={"model": "m", "messages": [], "input": "p"})
            assert reply.json() == {"input_tokens": 5}
        eventually(lambda: front.counts() == {"ok": 2.0})
        text = front.client.get("/metrics").text
    counted = [line for line in text.splitlines() if line.startswith("penstock_gateway_request_total{")]
    assert all('api="other"' in line for line in counted), counted
    assert "penstock_gateway_tokens_total{" not in text


def test_models_are_those_of_a_server_in_its_shape(front: Gateway, upstream: Upstream) -> None:
    upstream.behaviour = lambda call: call.reply(200, b'{"data":[],"has_more":false}')
    assert front.client.get("/v1/models", headers={**KEY, **VERSION}).json()["has_more"] is False
    assert upstream.calls[-1].headers["anthropic-version"] == VERSION["anthropic-version"]
    upstream.behaviour = good
