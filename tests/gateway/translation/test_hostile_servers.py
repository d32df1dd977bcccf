"""Servers of chat completions that break off, or send what is none: clients get errors of their own API."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.processes import Call, Gateway, Upstream, gateway, outcome_of
from tests.gateway.translation.test_translated import pool_of

TEXT = '{"choices":[{"index":0,"delta":{"content":"Hello"}}]}'
STOP = '{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}'
USAGE = '{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}'
ERROR = '{"error":{"message":"out of memory","type":"server_error","code":500}}'


def events(*sent: str, end: bool = True) -> Callable[[Call], None]:
    return lambda call: call.stream(*sent, end=end)


def broken(*sent: str) -> Callable[[Call], None]:
    def behave(call: Call) -> None:
        call.stream(*sent, end=False)
        call.reset()

    return behave


def whole(body: str, status: int = 200) -> Callable[[Call], None]:
    return lambda call: call.reply(status, body.encode())


def call_piece(**fields: Any) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": {"tool_calls": [fields]}}]})


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    with Upstream(events(TEXT, STOP, USAGE, "[DONE]")) as server:
        yield server


@pytest.fixture(scope="module")
def front(upstream: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    pool = pool_of(upstream.url, tmp_path_factory.mktemp("gateway"))
    with gateway(options=pool) as running:
        yield running


def messages(front: Gateway, *, stream: bool = True) -> Any:
    body = {"model": "m", "max_tokens": 9, "stream": stream, "messages": [{"role": "user", "content": "a"}]}
    return front.client.post("/v1/messages?beta=true", json=body, headers={"x-api-key": "sk-1"})


def responses(front: Gateway, *, stream: bool = True) -> Any:
    return front.client.post("/v1/responses", json={"model": "m", "stream": stream, "input": "a"})


def last_event(text: str) -> Any:
    return json.loads(text.strip().split("data: ")[-1])


BAD_STREAMS = {
    "bad JSON": (events(TEXT, "{", STOP, "[DONE]"), "content_error"),
    "another type": (events(TEXT, '{"choices":[{"delta":{"content":7}}]}', "[DONE]"), "content_error"),
    "an error": (events(TEXT, ERROR, "[DONE]"), "model_server_error"),
    "an error at once": (events(ERROR), "model_server_error"),
    "an error by name": (
        lambda call: (
            call.stream(TEXT, end=False),
            call.chunk(b'event: error\ndata: {"reason":"no"}\n\n'),
            call.send(b"0\r\n\r\n"),
        ),
        "model_server_error",
    ),
    "no end": (events(TEXT), "network_error"),
    "cut": (broken(TEXT), "network_error"),
    "a call without a name": (events(call_piece(index=0, function={"arguments": "{"})), "content_error"),
    "mixed calls": (
        events(
            call_piece(index=0, id="a", function={"name": "f", "arguments": "{"}),
            call_piece(index=1, id="b", function={"name": "g", "arguments": "{"}),
            call_piece(index=0, function={"arguments": "}"}),
            call_piece(index=1, function={"arguments": "}"}),
        ),
        "content_error",
    ),
    "an event that does not end": (
        lambda call: (call.stream(TEXT, end=False), call.send(b"fffffff\r\n"), _flood(call)),
        "content_error",
    ),
}


def _flood(call: Call) -> None:
    call.send(b"data: ")
    for _ in range(20):
        call.send(b"x" * (1 << 20))
    call.wait_until_gone()


@pytest.mark.parametrize("name", BAD_STREAMS)
def test_a_bad_stream_ends_with_an_error(upstream: Upstream, front: Gateway, name: str) -> None:
    upstream.behaviour, outcome = BAD_STREAMS[name]
    replies: list[Any] = []
    assert outcome_of(front, lambda: replies.append(messages(front))) == outcome
    last = last_event(replies[0].text)
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert replies[0].text.count("event: error") == 1
    assert outcome_of(front, lambda: replies.append(responses(front))) == outcome
    last = last_event(replies[1].text)
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert replies[1].text.count("response.failed") == 2


GOOD_STREAMS = {
    "no usage": (events(TEXT, STOP, "[DONE]"), "ok_without_usage", 1),
    "no terminator": (events(TEXT, STOP, USAGE), "ok", 2),
    "no finish reason": (events(TEXT, USAGE, "[DONE]"), "ok", 2),
    "text after the end": (events(TEXT, STOP, TEXT, USAGE, "[DONE]"), "ok", 2),
    "usage in each event": (
        events(TEXT[:-1] + ',"usage":{"prompt_tokens":3,"completion_tokens":2}}', STOP, "[DONE]"),
        "ok",
        2,
    ),
    "CRLF": (
        lambda call: (
            call.stream(end=False),
            call.chunk(f"data: {TEXT}\r\n\r\n: a\r\n\r\ndata: {STOP}\r\n\r\n".encode()),
            call.chunk(f"data:{USAGE}\r\n\r\ndata: [DONE]\r\n\r\n".encode()),
            call.send(b"0\r\n\r\n"),
        ),
        "ok",
        2,
    ),
}


@pytest.mark.parametrize("name", GOOD_STREAMS)
def test_what_servers_leave_out(upstream: Upstream, front: Gateway, name: str) -> None:
    upstream.behaviour, outcome, tokens = GOOD_STREAMS[name]
    replies: list[Any] = []
    assert outcome_of(front, lambda: replies.append(messages(front))) == outcome
    assert '"text":"Hello"' in replies[0].text
    assert replies[0].text.count("Hello") == 1
    assert last_event(replies[0].text) == {"type": "message_stop"}
    assert f'"output_tokens":{tokens}}}' in replies[0].text


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("body", "status", "outcome", "wanted"),
    [
        (ERROR, 200, "model_server_error", 502),
        ('{"message":"no","type":"x","code":1}', 200, "model_server_error", 502),
        ("{", 200, "model_server_error", 502),
        ("[]", 200, "model_server_error", 502),
        ('{"choices":[]}', 200, "model_server_error", 502),
        ('{"error":{"message":"too long","type":"invalid_request_error"}}', 400, "client_error", 400),
        ('{"detail":[{"msg":"extra"}]}', 422, "client_error", 422),
        ("<html>no</html>", 404, "client_error", 404),
        ("", 403, "client_error", 403),
    ],
)
def test_errors_have_the_shape_of_the_api(
    upstream: Upstream, front: Gateway, body: str, status: int, outcome: str, wanted: int, *, stream: bool
) -> None:
    upstream.behaviour = whole(body, status)
    replies: list[Any] = []
    for ask in (messages, responses):
        found = outcome_of(front, lambda ask=ask: replies.append(ask(front, stream=stream)))
        assert found == outcome or (stream and status == 200), found
    first, second = replies
    assert (first.status_code, second.status_code) == (wanted, wanted), first.text
    assert first.json()["type"] == "error"
    assert first.json()["error"]["message"]
    assert second.json()["error"]["message"]
    assert "type" not in second.json()


def test_what_the_server_gets(upstream: Upstream, front: Gateway) -> None:
    upstream.behaviour = whole(
        '{"choices":[{"message":{"content":"Hi","tool_calls":[]},"finish_reason":"stop"}]}'
    )
    assert messages(front, stream=False).json()["content"] == [
        {"type": "text", "text": "Hi", "citations": None}
    ]
    call = upstream.calls[-1]
    assert (call.method, call.path) == ("POST", "/v1/chat/completions")
    assert call.json == {
        "model": "m",
        "max_tokens": 9,
        "stream": False,
        "messages": [{"role": "user", "content": "a"}],
    }
    assert call.headers["authorization"] == "Bearer sk-1"
    assert "x-api-key" not in call.headers


def test_calls_of_other_dialects(upstream: Upstream, front: Gateway) -> None:
    """All with the same index; arguments as an object, and none."""
    upstream.behaviour = events(
        call_piece(index=0, id="a", function={"name": "f", "arguments": {"x": 1}}),
        call_piece(index=0, id="b", function={"name": "g"}),
        '{"choices":[{"index":0,"delta":{"content":[{"type":"text","text":"."}]},"finish_reason":"tool_calls"}]}',
        "[DONE]",
    )
    text = responses(front).text
    response = last_event(text)["response"]
    assert [(item.get("name"), item.get("arguments")) for item in response["output"]] == [
        ("f", '{"x":1}'),
        ("g", "{}"),
        (None, None),
    ]


def test_a_server_that_speaks_the_api_gets_it_as_it_is(tmp_path: Path) -> None:
    with (
        Upstream(whole('{"type":"message","content":[]}')) as server,
        gateway(options=pool_of(server.url, tmp_path, "[chat, messages]")) as front,
    ):
        assert messages(front, stream=False).json() == {"type": "message", "content": []}
        assert server.calls[-1].path == "/v1/messages?beta=true"
        reply = front.client.post("/v1/completions", json={"model": "m", "prompt": "a"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "api_not_served")
        assert len(server.calls) == 1


def test_a_client_that_leaves(upstream: Upstream, front: Gateway) -> None:
    def behave(call: Call) -> None:
        call.stream(TEXT, end=False)
        call.wait_until_gone()

    upstream.behaviour = behave
    body = {"model": "m", "stream": True, "input": "a"}

    def leave() -> None:
        with front.client.stream("POST", "/v1/responses", json=body) as reply:
            next(reply.iter_lines())

    assert outcome_of(front, leave) == "client_disconnect"
    assert upstream.calls[-1].gone.wait(30)


@pytest.mark.parametrize("first", ["[chat]", "[messages]"])
def test_a_request_falls_back_to_a_pool_of_another_api(tmp_path: Path, first: str) -> None:
    """It is translated for the one that does not speak its API, whichever comes first."""
    chat = whole('{"choices":[{"message":{"content":"Hi"},"finish_reason":"stop"}]}')
    own = whole('{"type":"message","content":[{"type":"text","text":"Hi"}],"stop_reason":"end_turn"}')
    refusing = whole('{"error":{"message":"full"}}', 503)
    second = "[messages]" if first == "[chat]" else "[chat]"
    with Upstream(refusing) as one, Upstream(own if first == "[chat]" else chat) as other:
        path = tmp_path / "endpoints.yaml"
        path.write_text(
            "pools:\n"
            f"- {{name: a, endpoints: ['{one.url}'], models: [m], apis: {first}, fallback: [b]}}\n"
            f"- {{name: b, endpoints: ['{other.url}'], models: [m], apis: {second}}}\n"
        )
        with gateway(options=("--endpoints-file", str(path))) as front:
            reply = messages(front, stream=False)
            content = [{"citations": None, **block} for block in reply.json()["content"]]
            assert (reply.status_code, content) == (200, [{"type": "text", "text": "Hi", "citations": None}])
    chats, messages_ = (one, other) if first == "[chat]" else (other, one)
    assert chats.calls[-1].path == "/v1/chat/completions"
    assert messages_.calls[-1].path == "/v1/messages?beta=true"


def test_a_long_output(upstream: Upstream, front: Gateway) -> None:
    """One that the last events repeat, and one that is too long for that."""
    long = json.dumps({"choices": [{"index": 0, "delta": {"content": "x" * (1 << 20)}}]})
    upstream.behaviour = events(long, STOP, USAGE, "[DONE]")
    response = last_event(responses(front).text)["response"]
    assert len(response["output"][0]["content"][0]["text"]) == 1 << 20
    upstream.behaviour = events(*[long] * 5, STOP, USAGE, "[DONE]")
    response = last_event(responses(front).text)["response"]
    assert (response["status"], "too long" in response["error"]["message"]) == ("failed", True)


def test_signs_of_life_are_passed_on(upstream: Upstream, front: Gateway) -> None:
    def behave(call: Call) -> None:
        call.stream(end=False)
        call.chunk(b": waiting\n\n")
        call.chunk(f"data: {TEXT}\n\ndata: {STOP}\n\ndata: [DONE]\n\n".encode())
        call.send(b"0\r\n\r\n")

    upstream.behaviour = behave
    assert messages(front).text.startswith("event: ping\n")


def test_a_vendor_that_speaks_chat_alone(tmp_path: Path) -> None:
    """It gets its own key and path, and nothing that only Anthropic or the gateway's own servers need."""
    key, path = tmp_path / "key", tmp_path / "endpoints.yaml"
    key.write_text("sk-vendor\n")
    key.chmod(0o600)
    with Upstream(whole('{"choices":[{"message":{"content":"Hi"},"finish_reason":"stop"}]}')) as vendor:
        pool = f"name: v, endpoints: ['{vendor.url}/api/v1'], hosted: true, key: {{file: {key}}}"
        path.write_text(f"pools:\n- {{{pool}, models: [m], apis: [chat]}}\n")
        with gateway(options=("--endpoints-file", str(path))) as front:
            reply = front.client.post(
                "/v1/messages?beta=true",
                json={
                    "model": "m",
                    "max_tokens": 5,
                    "metadata": {"user_id": "somebody"},
                    "messages": [{"role": "user", "content": "a"}],
                },
                headers={"x-api-key": "sk-1", "anthropic-version": "2023-06-01", "anthropic-beta": "b"},
            )
    assert reply.json()["content"] == [{"type": "text", "text": "Hi", "citations": None}]
    [call] = [each for each in vendor.calls if each.method == "POST"]
    assert (call.path, call.headers["authorization"]) == ("/api/v1/chat/completions", "Bearer sk-vendor")
    assert not {"x-api-key", "x-session-id", "anthropic-version", "anthropic-beta"} & call.headers.keys()
    assert b"somebody" not in call.body
