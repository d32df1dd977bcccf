"""Which requests a gateway relays, however they are spelled."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.gateway.behaviours import good
from tests.gateway.processes import Behaviour, Call, Gateway, Upstream, eventually, gateway
from tests.gateway.test_gateway import raw_exchange


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    with Upstream(good) as server:
        yield server


@pytest.fixture(scope="module")
def front(upstream: Upstream) -> Iterator[Gateway]:
    with gateway(upstream) as running:
        yield running


def test_no_spelling_of_a_route_gets_around_what_reads_its_body(upstream: Upstream, front: Gateway) -> None:
    for path in ("//v1//completions", "/v1/completions/", "/v1/Completions", "/%761/completions"):
        before = len(upstream.calls)
        reply = raw_exchange(
            front,
            f"POST {path} HTTP/1.1\r\nhost: h\r\nconnection: close\r\ncontent-length: 1\r\n\r\n{{".encode(),
        )
        assert reply.startswith(b"HTTP/1.1 400 "), path
        assert len(upstream.calls) == before


def test_a_slash_at_the_end_is_not_relayed(upstream: Upstream, front: Gateway) -> None:
    """Many servers answer it with a redirect, which clients do not follow with a POST."""
    body = {"model": "m", "prompt": "p", "stream": True}
    for path in ("/v1/completions/", "/v1/embeddings/"):
        assert front.client.post(path, json=body).is_success
        assert upstream.calls[-1].path == path.rstrip("/")
    before = len(upstream.calls)
    for path in ("/sleep/", "/admin/engines/", "/debug/gc/"):
        assert front.client.post(path).status_code == 403, path
    refused = front.client.put("/health/")
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD, POST")
    assert len(upstream.calls) == before


def test_routes_below_a_prefix_and_further_ones(upstream: Upstream) -> None:
    options = ("--root-path", "/llm", "--allow-route", "POST /abort_request", "/slots/*")
    with gateway(upstream, options=options) as front:
        assert front.client.get("/llm/version").json() == front.client.get("/version").json()
        body = {"model": "m", "prompt": "p", "stream": True}
        assert front.client.post("/llm/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
        assert upstream.calls[-1].path == "/llm/v1/completions", "as the client sent it"
        assert front.counts() == {"ok": 1.0}
        for path in ("/abort_request", "/llm/abort_request", "/slots/0"):
            assert front.client.post(path, json={}).status_code == 200
        for path in ("/sleep", "/llm/sleep", "/slots"):
            assert front.client.post(path).status_code == 403


def below_prefix_alone(model: str) -> Behaviour:
    """As llama.cpp answers with --api-prefix."""

    def answer(call: Call) -> None:
        if call.path == "/llm/v1/models":
            call.reply(200, json.dumps({"data": [{"id": model}]}).encode())
        elif call.path == "/llm/metrics":
            call.reply(200, b"llamacpp:requests_deferred 3\n", "text/plain")
        elif call.path == "/llm/v1/completions":
            good(call)
        else:
            call.reply(404, b"{}")

    return answer


def test_the_gateway_itself_asks_below_the_prefix() -> None:
    with Upstream(below_prefix_alone("a")) as one, Upstream(below_prefix_alone("b")) as other:
        for server in (one, other):
            server.on_metrics = server.on_models = lambda call: call.reply(404, b"{}")
        with gateway(one, other, options=("--root-path", "/llm", "--scrape-interval", "0.1")) as front:
            for model, server in (("a", one), ("b", other), ("a", one)):
                reply = front.client.post("/llm/v1/completions", json={"model": model, "prompt": "p"})
                assert reply.status_code == 200
                asked = [call.json["model"] for call in server.calls if call.path == "/llm/v1/completions"]
                assert set(asked) == {model}
            waiting = {one.url: 3.0, other.url: 3.0}
            eventually(lambda: front.counts("endpoint_waiting") == waiting)


def test_the_gateways_own_state_is_not_for_strangers(front: Gateway, upstream: Upstream) -> None:
    reply = front.client.get("/debug/gc")
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "not_local")
    assert "--uds" not in reply.text
    with gateway(upstream, options=("--allow-loopback-admin",)) as trusting:
        assert trusting.client.get("/debug/gc").status_code == 200
        assert trusting.client.get("/debug/gc", headers={"via": "x"}).status_code == 403
    with gateway(upstream, options=("--api-key", "k")) as locked:
        assert locked.client.get("/debug/gc").status_code == 401
        assert locked.client.get("/debug/gc", headers={"x-api-key": "k"}).status_code == 200
    with gateway(upstream, options=("--api-key", "k", "--admin-api-key", "root")) as administered:
        for path, key, status in (
            ("/debug/gc", "", 401),
            ("/debug/gc", "k", 403),
            ("/debug/gc", "root", 200),
            ("/metrics", "", 401),
            ("/metrics", "k", 200),
            ("/metrics", "root", 200),
            ("/v1/anything", "root", 403),
            ("/health", "", 200),
        ):
            assert administered.client.get(path, headers={"x-api-key": key}).status_code == status, (
                path,
                key,
            )


def test_websockets_are_refused_as_such(upstream: Upstream, front: Gateway) -> None:
    """Relayed without its upgrade the request would be a riddle to any server."""
    before, rejected = len(upstream.calls), front.counts("rejection_total").get("websocket", 0.0)
    handshake = (
        b"GET /v1/realtime?model=m HTTP/1.1\r\nhost: h\r\nconnection: Upgrade, close\r\n"
        b"upgrade: WebSocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZQ==\r\n\r\n"
    )
    reply = raw_exchange(front, handshake)
    assert reply.startswith(b"HTTP/1.1 501 ")
    error = json.loads(reply.partition(b"\r\n\r\n")[2])["error"]
    assert error["code"] == "websocket"
    assert "WebSocket" in error["message"]
    assert len(upstream.calls) == before
    assert front.counts("rejection_total")["websocket"] == rejected + 1
    offer = {"connection": "Upgrade", "upgrade": "h2c"}
    asked = front.client.post("/v1/completions", json={"model": "m", "prompt": "p"}, headers=offer)
    assert asked.status_code == 200, "an offer that need not be taken"


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_the_root_is_the_gateways_own(upstream: Upstream, method: str) -> None:
    """Load balancers ask for it. A server's page would come without its scripts, of a server by chance."""
    before = len(upstream.calls)
    with gateway(upstream, options=("--api-key", "k")) as front:
        assert front.client.request(method, "/").status_code == 200
        assert front.counts() == {}
    assert len(upstream.calls) == before
