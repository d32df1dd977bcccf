"""Several models behind one gateway: real gateways and servers that list what they serve."""

from __future__ import annotations

import json
from pathlib import Path

from tests.gateway.behaviours import good, stalled
from tests.gateway.processes import Behaviour, Call, Upstream, closed_port, eventually, gateway


def listing(*names: str, **more: object) -> Behaviour:
    entries = [{"id": name, "object": "model", "max_model_len": 4096, **more} for name in names]
    return lambda call: call.reply(200, json.dumps({"object": "list", "data": entries}).encode())


def serving(*names: str, behaviour: Behaviour = good) -> Upstream:
    server = Upstream(behaviour)
    server.on_models = listing(*names)
    return server


def refusing(status: int) -> Behaviour:
    return lambda call: call.reply(status, b'{"error":{"message":"busy"}}')


def models_of(server: Upstream) -> list[str]:
    return [call.json["model"] for call in server.calls]


def test_requests_go_to_the_servers_of_their_model() -> None:
    with serving("small", "adapter") as small, serving("large") as large, gateway(small, large) as front:
        for model in ("small", "large", "adapter", "large"):
            assert front.complete(model=model).status_code == 200
        embedded = front.client.post("/v1/embeddings", json={"model": "large", "input": "x"})
        assert embedded.status_code == 200
        assert models_of(small) == ["small", "adapter"]
        assert models_of(large) == ["large", "large", "large"]
        reply = front.complete(model="gpt-4")
        assert reply.status_code == 404
        assert reply.json()["error"] == {
            "message": "The model `gpt-4` does not exist. There are: adapter, large, small.",
            "type": "NotFoundError",
            "param": "model",
            "code": "model_not_found",
        }
        refused = front.client.post(
            "/v1/messages",
            json={"model": "gpt-4", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]},
            headers={"anthropic-version": "2023-06-01"},
        )
        assert (refused.status_code, refused.json()["error"]["type"]) == (404, "not_found_error")
        assert front.counts("rejection_total") == {"model_not_found": 2}


def test_the_listing_has_the_models_of_all() -> None:
    options = ("--model-rewrite", "chat=small:9,large:1", "claude-*=large")
    with (
        serving("small") as small,
        serving("large", "org/sql") as large,
        gateway(small, large, options=options) as front,
    ):
        listed = front.client.get("/v1/models").json()
        assert listed["object"] == "list"
        assert [card["id"] for card in listed["data"]] == ["small", "large", "org/sql", "chat"]
        assert listed["data"][3] == {
            "id": "chat",
            "object": "model",
            "created": 0,
            "owned_by": "",
            "parent": "small",
            "max_model_len": 4096,
        }
        described = front.client.get("/v1/models/large").json()
        assert (described["created"], described["owned_by"]) == (0, ""), "strict clients need all fields"
        assert front.client.get("/v1/models/org/sql").json()["id"] == "org/sql"
        assert front.client.get("/v1/models/org%2Fsql").json()["id"] == "org/sql"
        missing = front.client.get("/v1/models/none")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        version = {"anthropic-version": "2023-06-01"}
        entry = front.client.get("/v1/models", headers=version).json()["data"][0]
        assert (entry["type"], entry["display_name"], entry["max_input_tokens"]) == (
            "model",
            "small",
            4096,
        )
        of_google = {"x-goog-api-key": "none"}
        listed = front.client.get("/v1/models", headers=of_google).json()["models"]
        assert [(entry["name"], entry["inputTokenLimit"]) for entry in listed][::3] == [
            ("models/small", 4096),
            ("models/chat", 4096),
        ]
        assert front.client.get("/v1/models/large", headers=of_google).json()["name"] == "models/large"
        assert front.complete(model="claude-opus-5").status_code == 200
        assert models_of(large) == ["large"]
        assert not small.calls


def test_without_listings_requests_are_relayed_as_ever() -> None:
    with Upstream(good) as server, gateway(server) as front:
        assert front.complete(model="any").status_code == 200
        assert models_of(server) == ["any"]
        server.behaviour = lambda call: call.reply(200, b'{"data":[{"id":"theirs"}]}')
        assert front.client.get("/v1/models", headers={"authorization": "Bearer k"}).json()["data"]
        assert server.calls[-1].headers["authorization"] == "Bearer k", "the client's key may read it"


def test_what_can_be_asked_for_can_be_described() -> None:
    options = ("--model-rewrite", "claude-*=small")
    with serving("small") as server, gateway(server, options=options) as front:
        described = front.client.get("/v1/models/claude-opus").json()
        assert (described["id"], described["parent"], described["max_model_len"]) == (
            "claude-opus",
            "small",
            4096,
        )
        server.behaviour = lambda call: call.reply(200, b'{"id":"gpt-4"}')
        assert front.client.get("/v1/models/gpt-4").json() == {"id": "gpt-4"}, "an alias of the server"
        assert server.calls[-1].path == "/v1/models/gpt-4"


def test_whoever_would_get_a_name_describes_it() -> None:
    """A hosted API lists its models to its own clients alone: what is described, and served, is the same."""
    hosted = Upstream(lambda call: call.reply(200, b'{"id":"gpt-4"}'))
    hosted.on_models = refusing(401)
    with hosted, serving("small") as small, gateway(small, hosted) as front:
        assert front.complete(model="small").status_code == 200
        assert models_of(small) == ["small"]
        assert front.client.get("/v1/models/gpt-4").json() == {"id": "gpt-4"}
        assert [call.path for call in hosted.calls] == ["/v1/models/gpt-4"]
        hosted.calls.clear()
        assert front.client.get("/v1/models/small").json()["id"] == "small"
        assert not hosted.calls


def test_head_has_the_size_of_the_listing() -> None:
    with serving("small") as small, serving("large") as large, gateway(small, large) as front:
        for path in ("/v1/models", "/v1/models/large"):
            size = front.client.head(path).headers["content-length"]
            assert int(size) == len(front.client.get(path).content)
        missing = front.client.head("/v1/models/none")
        assert (missing.status_code, missing.content) == (404, b"")
        assert not small.calls + large.calls


def test_a_model_that_was_loaded_lately_is_found() -> None:
    with serving("small") as small, serving("large") as large, gateway(small, large) as front:
        large.on_models = listing("large", "loaded")
        assert front.complete(model="loaded").status_code == 200
        assert models_of(large) == ["loaded"]


def test_a_model_that_was_unloaded_is_served_by_another() -> None:
    def unloaded(call: Call) -> None:
        call.reply(404, b'{"error":{"message":"The model `m` does not exist.","code":404}}')

    options = ("--scorers", "session=1")
    with serving("m", "a") as one, serving("m", "b") as other, gateway(one, other, options=options) as front:
        for server in (one, other):
            server.behaviour = unloaded
            server.on_models = listing("a" if server is one else "b")
            reply = front.complete(model="m")
            assert reply.status_code == (200 if server is one else 404), "nobody has it in the end"
        assert front.complete(model="a").status_code == 404, "what the server says"


# -- what takes the place of a model


def in_file(tmp_path: Path, text: str) -> tuple[str, ...]:
    path = tmp_path / "endpoints.yaml"
    path.write_text(text)
    return "--endpoints-file", str(path)


def test_another_model_takes_the_place(tmp_path: Path) -> None:
    with serving("busy", "alone", behaviour=refusing(429)) as busy, serving("small") as small:
        down = f"- name: down\n  endpoints: [{closed_port()}]\n  models: [down]\n  fallback: [small]\n"
        options = in_file(tmp_path, f"endpoints: [{busy.url}, {small.url}]\npools:\n{down}")
        with gateway(options=(*options, "--model-fallback", "busy=small", "--max-attempts", "1")) as front:
            for model in ("busy", "down", "busy", "down"):
                assert front.complete(model=model).status_code == 200
            assert models_of(small) == ["small"] * 4
            assert front.counts("fallback_total") == {"": 4}
            assert front.complete(model="alone").status_code == 429, "nothing stands in"
            assert len(small.calls) == 4


def test_a_pool_takes_the_place_and_is_told_apart(tmp_path: Path) -> None:
    with serving("m") as main, serving("m") as spare:
        options = in_file(
            tmp_path,
            f"pools:\n- name: main\n  endpoints: [{main.url}]\n  fallback: [spare]\n"
            f"- name: spare\n  endpoints: [{spare.url}]\n",
        )
        with gateway(options=options) as front:
            assert front.complete().status_code == 200
            assert not spare.calls, "it only stands in"
            main.behaviour = refusing(503)
            assert front.complete().status_code == 200
            text = front.client.get("/metrics").text
            assert 'penstock_gateway_ready_endpoints{pool="main"} 1' in text
            assert 'pool="spare"' in text


def test_pools_follow_their_file(tmp_path: Path) -> None:
    with serving("a") as one, serving("b") as other:
        path = tmp_path / "endpoints.yaml"
        pools = f"pools:\n- name: one\n  endpoints: [{one.url}]\n- name: other\n  endpoints: [{other.url}]\n"
        path.write_text(pools)
        with gateway(options=("--endpoints-file", str(path))) as front:
            assert front.complete(model="chat").status_code == 404
            path.write_text(pools + "models: {chat: {targets: {b: 1}}}\n")
            eventually(lambda: front.complete(model="chat").status_code == 200)
            assert models_of(other) == ["b"]


# -- shadows


def test_a_shadow_gets_copies_and_costs_the_client_nothing() -> None:
    options = ("--model-shadow", "m=next:1", "broken=next:1", "--first-token-timeout", "60")
    with (
        serving("m", "broken") as server,
        serving("next") as shadow,
        gateway(server, shadow, options=options) as front,
    ):
        assert [front.complete(model="m").status_code for _ in range(3)] == [200, 200, 200]
        eventually(lambda: front.counts("shadow_request_total").get("ok_without_usage,next") == 3)
        assert models_of(shadow) == ["next"] * 3
        assert shadow.calls[0].headers["x-penstock-shadow"] == "1"
        assert models_of(server) == ["m"] * 3
        shadow.behaviour = refusing(500)
        for _ in range(5):
            assert front.complete(model="m").status_code == 200
        eventually(lambda: front.counts("shadow_request_total").get("model_server_error,next") == 5)
        assert front.counts("endpoint_up")[shadow.url] == 1, "copies say nothing to a circuit breaker"
        shadow.behaviour = stalled
        assert front.complete(model="m", stream=False).status_code == 200
        assert sum(front.counts().values()) == 9, "copies are no requests of clients"
        eventually(lambda: len(shadow.calls) == 9)
        assert front.client.post("/v1/responses", json={"model": "m", "input": "x"}).status_code == 200
        assert front.complete(model="m").status_code == 200
        eventually(lambda: len(shadow.calls) == 10)
        assert shadow.calls[-1].path == "/v1/completions", "what is stored is not copied"
