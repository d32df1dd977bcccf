"""A server behind a gateway that translates answers as it answers itself, event by event."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.gateway.processes import Gateway, eventually, gateway
from tests.integration.server import Server

SCRIPT = """
rules:
- match: {tool: read_file, text: "speed = 3"}
  reply: {reasoning: It is a number., text: The speed is 3.}
- match: {last: user, text: Read}
  reply:
    reasoning: Two files at once.
    text: I read both.
    calls:
    - {name: read_file, arguments: {path: "a b.ini", lines: [1, 2]}}
    - {name: read_file, arguments: {path: "ä\\n{}"}}
- match: {text: Patch}
  reply:
    calls: [{name: patch, arguments: {input: "*** \\"ä\\" \\\\ 😀\\n"}}]
- match: {text: fail}
  reply: {text: "One, two, three."}
  end: error
  after-tokens: 3
- match: {text: long}
  reply: {text: "%s"}
- match: {text: answer}
  reply: {text: '{"answer": 42}'}
- match: {text: Think}
  reply: {reasoning: Hm., text: Yes.}
"""
LONG = "A sentence of some length. " * 40
MODEL = "penstock-demo"
SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
PATH_SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("chat")
    script = directory / "script.yaml"
    script.write_text(SCRIPT % LONG)
    scripted = ("--engine", "synthetic", "--synthetic-script", str(script), "--synthetic-step-ms", "1")
    model = ("--reasoning-parser", "think", "--max-model-len", "20000")
    with Server(*scripted, *model, directory=directory) as running:
        yield running


@pytest.fixture(scope="module")
def front(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(options=pool_of(server.url, tmp_path_factory.mktemp("gateway"))) as running:
        yield running


def pool_of(url: str, directory: Path, apis: str = "[chat]") -> tuple[str, ...]:
    """Options of a gateway with one pool."""
    path = directory / "endpoints.yaml"
    path.write_text(f"pools:\n- {{name: p, endpoints: ['{url}'], apis: {apis}}}\n")
    return ("--endpoints-file", str(path))


MESSAGES: dict[str, dict[str, Any]] = {
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}, "said": "Think"},
    "thinking, not asked for": {"said": "Think"},
    "thinking, omitted": {"thinking": {"type": "adaptive", "display": "omitted"}, "said": "Think"},
    "long": {"said": "long"},
    "cut": {"said": "long", "max_tokens": 5},
    "stopped": {"said": "long", "stop_sequences": ["of some"]},
    "calls": {
        "said": "Read",
        "tools": [{"name": "read_file", "input_schema": PATH_SCHEMA}],
        "thinking": {"type": "adaptive"},
    },
    "schema": {
        "said": "answer",
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
}
RESPONSES: dict[str, dict[str, Any]] = {
    "reasoning": {"said": "Think"},
    "summary": {
        "said": "Think",
        "reasoning": {"effort": "high", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
    },
    "long": {"said": "long", "instructions": "Be long."},
    "cut": {"said": "long", "max_output_tokens": 5},
    "calls": {
        "said": "Read",
        "tools": [
            {"type": "function", "name": "read_file", "parameters": PATH_SCHEMA, "strict": False},
            {"type": "web_search"},
        ],
    },
    "a custom tool": {"said": "Patch", "tools": [{"type": "custom", "name": "patch"}]},
    "a namespace": {
        "said": "Read",
        "tools": [
            {"type": "namespace", "name": "fs", "tools": [{"type": "function", "name": "read_file"}]},
            {"type": "function", "name": "read_file"},
        ],
    },
    "schema": {"said": "answer", "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("case", MESSAGES)
def test_messages(server: Server, front: Gateway, case: str, *, stream: bool) -> None:
    fields = dict(MESSAGES[case])
    body = {"model": MODEL, "max_tokens": 5000, "stream": stream, **fields}
    body["messages"] = [{"role": "user", "content": body.pop("said")}]
    _same(server, front, "/v1/messages", body)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("case", RESPONSES)
def test_responses(server: Server, front: Gateway, case: str, *, stream: bool) -> None:
    fields = dict(RESPONSES[case])
    # Without them the server says what its model has by itself.
    body = {"model": MODEL, "store": False, "stream": stream, "temperature": 1.0, "top_p": 1.0, **fields}
    body["input"] = body.pop("said")
    _same(server, front, "/v1/responses", body)


def _same(server: Server, front: Gateway, path: str, body: dict[str, Any]) -> None:
    own = httpx.post(server.url + path, json=body, timeout=60)
    translated = front.client.post(path, json=body)
    assert (own.status_code, translated.status_code) == (200, 200), translated.text
    assert translated.headers.get("warning") == own.headers.get("warning")
    assert ("request-id" in translated.headers) == (path == "/v1/messages")
    assert comparable(translated) == comparable(own)


_DIFFERENT = ("id", "item_id", "call_id", "created_at", "completed_at", "signature", "input_tokens")
"""Fields whose values are those of one reply, or depend on the prompt."""


def comparable(reply: httpx.Response) -> list[Any]:
    """The events of a reply, or the whole of it: deltas in a row as one, as bytes may arrive together."""
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return [_without_ids(reply.json())]
    events: list[Any] = []
    for block in reply.text.split("\n\n"):
        lines = block.split("\n")
        data = next((line for line in lines if line.startswith("data: ")), None)
        if data is None:
            continue
        event = json.loads(data.removeprefix("data: "))
        assert lines[0] == f"event: {event['type']}"
        number = event.pop("sequence_number", None)
        assert number is None or number == sum(each["merged"] for each in events)
        event = {**_without_ids(event), "merged": 1}
        if events and "delta" in event and _may_join(events[-1], event):
            events[-1]["delta"] = _joined(events[-1]["delta"], event["delta"])
            events[-1]["merged"] += 1
        else:
            events.append(event)
    for event in events:
        del event["merged"]
    return events


def _may_join(before: Any, event: Any) -> bool:
    def kind(event: Any) -> Any:
        delta = event.get("delta")
        return event["type"], delta.get("type") if isinstance(delta, dict) else None

    return "delta" in before and kind(before) == kind(event)


def _joined(before: Any, delta: Any) -> Any:
    if isinstance(delta, str):
        return before + delta
    return {name: value if name == "type" else before[name] + value for name, value in delta.items()}


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: type(each).__name__ if name in _DIFFERENT else _without_ids(each)
            for name, each in value.items()
            if name != "total_tokens"
        }
    if isinstance(value, list):
        return [_without_ids(each) for each in value]
    return value


def test_a_conversation_with_results_and_images(server: Server, front: Gateway) -> None:
    """The server of chat completions gets what the model has to know."""
    image = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    messages: list[Any] = [
        {"role": "user", "content": "Read the files."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Well.", "signature": "s"},
                {"type": "tool_use", "id": "toolu_1", "name": "read_file", "input": {"path": "a"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "speed = 3"}, {"type": "image", "source": image}],
                }
            ],
        },
    ]
    tools = [{"name": "read_file", "input_schema": PATH_SCHEMA}]
    body = {"model": MODEL, "max_tokens": 100, "messages": messages, "tools": tools}
    reply = front.client.post("/v1/messages", json={**body, "thinking": {"type": "adaptive"}})
    kinds = [(block["type"], block.get("text", block.get("thinking"))) for block in reply.json()["content"]]
    assert kinds == [("thinking", "It is a number."), ("text", "The speed is 3.")]


def test_openai_client(front: Gateway) -> None:
    client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)
    with client.responses.stream(
        model=MODEL,
        input="Read",
        tools=[{"type": "function", "name": "read_file", "parameters": PATH_SCHEMA}],
    ) as stream:
        kinds = [event.type for event in stream]
        response = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    calls = [item for item in response.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [
        {"path": "a b.ini", "lines": [1, 2]},
        {"path": "ä\n{}"},
    ]
    assert response.output_text == "I read both."
    assert response.usage is not None
    assert response.usage.output_tokens > 0


def test_tokens_are_not_counted(front: Gateway) -> None:
    reply = front.client.post("/v1/messages/count_tokens", json={"model": MODEL, "messages": []})
    assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")
    assert "tokens are not counted" in reply.json()["error"]["message"]


def test_an_engine_fails_in_a_stream(front: Gateway) -> None:
    body = {"model": MODEL, "max_tokens": 100, "stream": True}
    said = [{"role": "user", "content": "fail"}]
    reply = front.client.post("/v1/messages", json={**body, "messages": said})
    last = json.loads(reply.text.strip().split("data: ")[-1])
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert "content_block_delta" in reply.text
    reply = front.client.post("/v1/responses", json={"model": MODEL, "stream": True, "input": "fail"})
    last = json.loads(reply.text.strip().split("data: ")[-1])
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error"


def test_the_record_tells_usage_and_times(front: Gateway) -> None:
    """As of a request that is not translated, under its own API."""
    body = {"model": MODEL, "stream": True, "input": "Think"}
    id = front.client.post("/v1/responses", json=body).headers["x-request-id"]
    eventually(lambda: any(id in line for line in front.lines))
    line = next(line for line in front.lines if id in line)
    record = json.loads(line[line.index("{") :])
    assert (record["path"], record["outcome"], record["streamed"]) == ("/v1/responses", "ok", True)
    assert record["output_tokens"] == 16
    assert record["input_tokens"] > 0
    assert record["ttft"] > 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("background", True),
        ("truncation", "auto"),
        ("top_logprobs", 2),
        ("include", ["message.output_text.logprobs"]),
        ("input", [{"type": "item_reference", "id": "msg_1"}]),
        ("conversation", "c"),
    ],
)
def test_what_a_chat_server_cannot_do_is_refused(front: Gateway, field: str, value: Any) -> None:
    reply = front.client.post("/v1/responses", json={"model": MODEL, "input": "Hi", field: value})
    assert reply.status_code in (400, 404), reply.text
    assert field in reply.text
    if reply.status_code == 400:
        id = reply.headers["x-request-id"]
        eventually(lambda: any(id in line and '"reason": "bad_body"' in line for line in front.lines))
