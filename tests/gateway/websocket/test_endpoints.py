"""Which endpoint the responses of a WebSocket go to, as whom, and what becomes of them when it is gone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.model_server import model_server
from tests.gateway.processes import Call, Gateway, Upstream, eventually, gateway
from tests.gateway.websocket.sockets import (
    ClientSide,
    RefusedError,
    ServerSide,
    as_stream,
    by_socket,
    by_turns,
    logged,
    texts,
)

ADMIN = {"authorization": "Bearer admin-key"}


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[Upstream, Upstream, Gateway]]:
    options = ("--admin-api-key", "admin-key")
    with (
        Upstream(by_socket(by_turns)) as one,
        Upstream(by_socket(by_turns)) as other,
        gateway(one, other, options=options) as front,
    ):
        yield one, other, front


def not_found(event: dict[str, Any]) -> bool:
    return (event["status"], event["error"]["code"]) == (400, "previous_response_not_found")


def test_conversations_stay_at_their_server(two: tuple[Upstream, Upstream, Gateway]) -> None:
    one, other, front = two
    before = len(one.calls) + len(other.calls)
    with ClientSide(front, **ADMIN) as client:
        client.create(input="0")
        for turn in range(8):
            assert texts(client.create(input=f"{turn + 1}", previous_response_id=f"resp_{turn}")) == "ab"
        assert len(one.calls) + len(other.calls) == before + 1, "one connection, and nobody is asked"


def test_a_drained_endpoint_is_left_between_responses(two: tuple[Upstream, Upstream, Gateway]) -> None:
    one, other, front = two
    one.calls.clear()
    other.calls.clear()
    with ClientSide(front, **ADMIN) as client:
        assert texts(client.create(input="1")) == "ab"
        assert texts(client.create(input="2", previous_response_id="resp_1")) == "ab"
        drained, other = (one, other) if one.calls else (other, one)
        assert change(front, "drain", drained) == 200
        (refused,) = client.create(input="3", previous_response_id="resp_2")
        assert not_found(refused)
        assert texts(client.create(input="all")) == "ab"
        assert texts(client.create(input="4", previous_response_id="resp_all")) == "ab"
        assert sum("upgrade" in call.headers for call in other.calls) == 1
        assert drained.calls[0].gone.wait(30), "its connection is closed"
    assert change(front, "undrain", drained) == 200


def change(front: Gateway, operation: str, server: Upstream) -> int:
    reply = front.client.post(f"/admin/endpoints/{operation}", json={"url": server.url}, headers=ADMIN)
    return reply.status_code


def test_refusals_go_to_another_server(two: tuple[Upstream, Upstream, Gateway]) -> None:
    def busy(side: ServerSide, fields: dict[str, Any]) -> None:
        error = {"type": "overloaded", "code": "overloaded", "message": "no"}
        side.send_json(type="error", status=503, error=error)

    one, _, front = two
    one.calls.clear()
    one.behaviour = by_socket(busy)
    before = front.counts()

    def asked_both() -> bool:
        with ClientSide(front, **ADMIN) as client:
            assert texts(client.create(input="1")) == "ab"
        return bool(one.calls)

    eventually(asked_both)
    after = front.counts()
    assert after.pop("ok") > before.pop("ok")
    assert after == before


def test_an_endpoint_that_is_killed() -> None:
    """The client is told to send the whole conversation, which another endpoint answers."""
    with model_server() as one, model_server() as two, gateway(one.url, two.url) as front:
        one.behave("by_turns")
        two.behave("by_turns")
        with ClientSide(front, x_request_id="killed") as client:
            assert texts(client.create(input="1")) == "ab"
            assert texts(client.create(input="2", previous_response_id="resp_1")) == "ab"
            killed, other = (one, two) if one.count() else (two, one)
            killed.process.kill()
            killed.process.wait()
            (refused,) = client.create(input="3", previous_response_id="resp_2")
            assert not_found(refused)
            assert texts(client.create(input="all")) == "ab"
            assert texts(client.create(input="4", previous_response_id="resp_all")) == "ab"
            assert other.count() >= 1
        outcomes = [each["outcome"] for each in logged(front, "killed", 5)]
        assert outcomes == ["ok", "ok", "network_error", "ok", "ok"]


# -- pools, keys, bills


def plain(call: Call) -> None:
    """A server without WebSockets."""
    if call.method == "GET":
        call.reply(405, b'{"detail":"Method Not Allowed"}')
    elif "previous_response_id" in call.json:
        call.reply(404, b'{"error":{"message":"No such response","code":404}}')
    else:
        as_stream(call)


def chat(call: Call) -> None:
    """A server of chat completions alone."""
    usage = '"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}'
    call.stream(
        '{"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":"h"}}]}',
        '{"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}',
        f'{{"id":"c","choices":[],{usage}}}',
        "[DONE]",
    )


def test_pools_keys_and_bills(tmp_path: Path) -> None:
    made: list[dict[str, Any]] = []
    fleet, keys, bills = tmp_path / "fleet.yaml", tmp_path / "keys.yaml", tmp_path / "bills.jsonl"
    keys.write_text(
        "keys:\n- {name: a, key: key-a, models: [short, plain, chat]}\n"
        "- {name: b, key: key-b, budgets: {requests-per-day: 1}}\n",
        encoding="utf-8",
    )
    keys.chmod(0o600)
    with (
        Upstream(by_socket(by_turns, made=made)) as spoken,
        Upstream(plain) as silent,
        Upstream(chat) as translated,
    ):
        fleet.write_text(
            "pools:\n"
            f"- {{name: real, models: [real], endpoints: ['{spoken.url}']}}\n"
            f"- {{name: plain, models: [plain], endpoints: ['{silent.url}']}}\n"
            f"- {{name: chat, models: [chat], apis: [chat], endpoints: ['{translated.url}']}}\n"
            "currency: USD\n"
            "models: {real: {prices: {input: 0.1, output: 0.25}}, short: {targets: real}}\n",
            encoding="utf-8",
        )
        options = ("--endpoints-file", str(fleet), "--client-keys-file", str(keys), "--billing-file")
        with gateway(options=(*options, str(bills), "--endpoint-api-key", "inner")) as front:
            with pytest.raises(RefusedError, match="401"):
                ClientSide(front)
            with ClientSide(front, authorization="Bearer key-b") as client:
                assert texts(client.create(model="real", input="b")) == "ab"
                (over,) = client.create(model="real")
                assert over["status"] == 429
            with ClientSide(front, authorization="Bearer key-a", x_request_id="a") as client:
                assert client.create(model="real")[0]["error"]["code"] == "model_not_allowed"
                assert texts(client.create(model="short", stream_id="l")) == "ab"
                assert texts(client.create(model="short", generate=False)) == "ab"
                for _ in range(2):
                    events = client.create(model="plain", stream_id="l", temperature=0.5)
                    assert [event["stream_id"] for event in events] == 3 * ["l"]
                    assert texts(events) == "h"
                refused = client.create(model="plain", generate=False)
                assert (refused[0]["status"], refused[0]["error"]["param"]) == (400, "generate")
                (lost,) = client.create(model="plain", previous_response_id="resp_h")
                assert not_found(lost)
                events = client.create(model="chat", stream_id="l")
                assert texts(events) == "h"
                assert {event["stream_id"] for event in events} == {"l"}
                assert events[-1]["response"]["usage"]["total_tokens"] == 4
                made_by_chat = events[-1]["response"]["id"]
                (lost,) = client.create(model="chat", previous_response_id=made_by_chat)
                assert not_found(lost)
    assert spoken.calls[0].headers["authorization"] == "Bearer inner"
    assert made[1:] == [
        {"type": "response.create", "model": "real", "input": "p", "stream_id": "l"},
        {"type": "response.create", "model": "real", "input": "p", "generate": False},
    ]
    asked = [call.method for call in silent.calls if call.path == "/v1/responses"]
    assert asked == ["GET", *3 * ["POST"]], "a handshake once"
    assert silent.calls[1].json == {"stream": True, "model": "plain", "input": "p", "temperature": 0.5}
    assert silent.calls[1].headers["content-type"] == "application/json"
    assert silent.calls[2].headers["x-request-id"] == "a.5"
    assert [call.path for call in translated.calls] == ["/v1/chat/completions"]
    lines = [json.loads(line) for line in bills.read_text().splitlines()]
    ids = [line["request_id"] for line in lines]
    assert len(set(ids)) == len(ids)
    assert {line["request_id"] for line in lines if line["outcome"] == "ok"} == {
        ids[0], "a.2", "a.3", "a.4", "a.5", "a.8",
    }  # fmt: skip
