"""Anthropic's API over real sockets: its headers, errors, keys and models."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.integration.server import SYNTHETIC, TLS, Server

BODY = {"model": "claude-x", "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}
VERSION = {"anthropic-version": "2023-06-01"}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    options = ("--model-alias", "claude-*=m", "fable=m", "--api-key", "secret")
    with (
        Server(*SYNTHETIC, *options, directory=tmp_path_factory.mktemp("messages")) as server,
        httpx.Client(base_url=server.url, headers={"x-api-key": "secret"}, timeout=30, verify=TLS) as client,
    ):
        yield client


def test_a_whole_message(client: httpx.Client) -> None:
    reply = client.post("/v1/messages?beta=true", json=BODY, headers={"anthropic-beta": "a,b"})
    message = reply.json()
    assert message["id"] == f"msg_{reply.headers['request-id']}"
    assert (message["model"], message["stop_reason"]) == ("m", "max_tokens")
    assert message["usage"]["output_tokens"] == 8
    counted = client.post("/v1/messages/count_tokens", json={**BODY, "max_tokens": None}).json()
    assert counted == {"input_tokens": message["usage"]["input_tokens"]}


def test_a_streamed_message(client: httpx.Client) -> None:
    with client.stream("POST", "/v1/messages", json={**BODY, "stream": True}) as reply:
        assert reply.headers["request-id"]
        lines = [line for line in reply.iter_lines() if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert [line.removeprefix("event: ") for line in lines[::2]] == [event["type"] for event in events]
    assert events[0]["message"]["usage"]["input_tokens"] > 0
    assert [event["type"] for event in events[-3:]] == ["content_block_stop", "message_delta", "message_stop"]


@pytest.mark.parametrize(
    ("path", "headers", "status", "kind"),
    [
        ("/v1/messages", {"x-api-key": "wrong"}, 401, "authentication_error"),
        ("/v1/messages/batches", {}, 404, "not_found_error"),
        ("/v1/nothing", VERSION, 404, "not_found_error"),
        ("/v1/messages", {"content-type": "text/plain"}, 400, "invalid_request_error"),
        ("/v1/messages/count_tokens", {"content-type": "text/plain"}, 400, "invalid_request_error"),
    ],
)
def test_errors(client: httpx.Client, path: str, headers: dict[str, str], status: int, kind: str) -> None:
    reply = client.post(path, content=json.dumps(BODY), headers=headers)
    error = reply.json()
    assert (reply.status_code, error["type"], error["error"]["type"]) == (status, "error", kind)
    assert error["request_id"] == reply.headers["request-id"]


def test_errors_of_other_apis_keep_their_shape(client: httpx.Client) -> None:
    reply = client.post("/v1/chat/completions", json={"model": "none", "messages": []}, headers=VERSION)
    assert reply.json()["error"]["code"] == "model_not_found"
    assert "request-id" not in client.get("/v1/nothing").headers


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/api/pull", {}, None),
        ("/v1beta/models/m:predict", {}, "NOT_FOUND"),
        ("/v1beta/cachedContents", {"x-goog-api-key": "k"}, "NOT_FOUND"),
        ("/v1/models/m:predictLongRunning", {"x-goog-api-key": "k"}, "NOT_FOUND"),
    ],
)
def test_clients_of_other_apis_read_errors_of_routes_that_are_not_served(
    client: httpx.Client, path: str, headers: dict[str, str], status: str | None
) -> None:
    error = client.post(path, json={}, headers=headers).json()["error"]
    if status is None:
        assert error.startswith(f"No route {path}.")
        assert "of Ollama's it has /api/" in error
    else:
        assert (error["status"], error.keys()) == (status, {"code", "message", "status"})
        assert "of Gemini's it has /v1beta/models" in error["message"]


def test_a_slash_at_the_end_of_a_route_makes_no_other_one(client: httpx.Client) -> None:
    assert client.post("/v1/messages/", json=BODY).json()["type"] == "message"
    assert client.post("/v1/chat/completions//", json=BODY).json()["object"] == "chat.completion"
    google = {"x-goog-api-key": "secret"}
    content = {"contents": [{"parts": [{"text": "a"}]}]}
    assert client.post("/v1beta/models/m:generateContent/", json=content, headers=google).is_success
    assert client.get("/v1/models/").json() == client.get("/v1/models").json()
    assert client.get("/v1/models/m/").json()["id"] == "m"
    assert client.post("/tokenize/", json={"prompt": "a"}).is_success
    assert client.head("/ready/").is_success
    wrong = {"x-api-key": "wrong"}
    assert client.get("/health/", headers=wrong).is_success
    for path in ("/v1/models/", "/metrics/", "/admin/engines/", "/v1/nothing/"):
        assert client.get(path, headers=wrong).status_code == 401, path
    refused = client.put("/v1/messages/")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert refused.json()["error"]["message"] == "/v1/messages takes POST, not PUT."


def test_the_list_of_models_has_the_shape_that_is_asked_for(client: httpx.Client) -> None:
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["m", "fable"]
    listed = client.get("/v1/models", headers=VERSION).json()
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("m", "fable", False)
    assert [entry["type"] for entry in listed["data"]] == ["model", "model"]
    for name in ("m", "fable", "claude-opus"):
        assert client.get(f"/v1/models/{name}", headers=VERSION).json()["display_name"] == name
    assert client.get("/v1/models/gpt", headers=VERSION).json()["error"]["type"] == "not_found_error"


def test_aliases_are_for_all_apis(client: httpx.Client) -> None:
    chat = {"model": "claude-x", "messages": BODY["messages"], "max_tokens": 2}
    assert client.post("/v1/chat/completions", json=chat).json()["model"] == "m"
