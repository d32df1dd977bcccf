"""A model that follows a script, in a server of real processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.integration.server import TLS, Server

SCRIPT = """
rules:
- match: {tool: read_file, text: "speed = 3"}
  reply: {reasoning: It is a number., text: The speed is 3.}
- match: {last: user, text: Read}
  reply:
    text: I read both.
    calls:
    - {name: read_file, arguments: {path: "a b.ini", lines: [1, 2]}}
    - {name: read_file, arguments: {path: "ä\\n{}"}}
- match: {text: crash}
  reply: {text: "One, two, three, four, five, six, seven."}
  end: exit
  after-tokens: 6
- match: {text: fail}
  reply: {text: "One, two, three."}
  end: error
  after-tokens: 3
- match: {text: answer}
  reply: {text: '{"answer": 42}'}
"""
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "lines": {"type": "array"}},
                "required": ["path"],
            },
        },
    }
]
MODEL = "penstock-demo"
SENT_BEFORE_THE_ERROR = "One,"
"""Text of the three tokens before the error; a busy server sends several of them in one event."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("scripted")
    script = directory / "script.yaml"
    script.write_text(SCRIPT)
    options = ("--engine", "synthetic", "--synthetic-script", str(script), "--synthetic-step-ms", "1")
    engines = ("--data-parallel-size", "2")
    with Server(*options, *engines, "--reasoning-parser", "think", directory=directory) as running:
        yield running


def streamed(client: openai.OpenAI, messages: list[Any], **options: Any) -> Any:
    with client.chat.completions.stream(model=MODEL, messages=messages, **options) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion().choices[0]


def test_a_round_of_tools(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Read the files."}]
    choice = streamed(client, messages, tools=TOOLS)
    calls = choice.message.tool_calls
    assert (choice.message.content, choice.finish_reason) == ("I read both.", "tool_calls")
    assert [json.loads(call.function.arguments) for call in calls] == [
        {"path": "a b.ini", "lines": [1, 2]},
        {"path": "ä\n{}"},
    ]
    messages.append(
        {"role": "assistant", "content": "I read both.", "tool_calls": [_plain(c) for c in calls]}
    )
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "speed = 3"} for call in calls]
    choice = streamed(client, messages, tools=TOOLS)
    assert (choice.message.content, choice.finish_reason) == ("The speed is 3.", "stop")
    assert choice.message.reasoning == "It is a number."


def _plain(call: Any) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": "function", "function": function}


def test_calls_that_the_request_forces(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Read the files."}]
    required = client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, tool_choice="required"
    ).choices[0]
    assert [call.function.name for call in required.message.tool_calls or ()] == ["read_file"] * 2  # type: ignore[union-attr]
    named: Any = {"type": "function", "function": {"name": "read_file"}}
    choice = client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, tool_choice=named
    ).choices[0]
    (call,) = choice.message.tool_calls or ()
    assert json.loads(call.function.arguments)["path"] == "a b.ini"  # type: ignore[union-attr]


def test_a_call_beside_a_tool_with_a_grammar_is_one_of_the_tools(client: openai.OpenAI) -> None:
    """As Codex has them: a custom tool with a grammar, and functions."""
    patch: Any = {
        "type": "custom",
        "name": "patch",
        "format": {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"},
    }
    tools: Any = [patch, *({"type": "function", **tool["function"]} for tool in TOOLS)]
    reply = client.responses.create(model=MODEL, input="Read the files.", tools=tools)
    assert [item.name for item in reply.output if item.type == "function_call"] == ["read_file"] * 2
    with pytest.raises(openai.BadRequestError, match=r"rules\[\d\] .* the request's tools"):
        client.responses.create(model=MODEL, input="Read the files.", tools=[patch])


def test_formats_that_the_request_asks_for(client: openai.OpenAI) -> None:
    def create(content: str) -> str | None:
        return (
            client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": content}],
                response_format={"type": "json_object"},
            )
            .choices[0]
            .message.content
        )

    assert create("answer") == '{"answer": 42}'
    with pytest.raises(openai.BadRequestError, match=r"rules\[3\] .* do not allow"):
        create("fail")


def test_an_engine_that_exits_in_mid_stream(server: Server, client: openai.OpenAI) -> None:
    choice = streamed(client, [{"role": "user", "content": "crash"}])
    assert choice.message.content == "One, two, three, four, five, six, seven."
    assert server.metric("penstock:streams_interrupted_total", outcome="resumed") == 1


def test_an_error_in_mid_stream(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "fail"}], stream=True
    )
    texts = []
    with pytest.raises(openai.APIError, match=r"rules\[3\] of the synthetic script"):
        texts.extend(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert "".join(texts) == SENT_BEFORE_THE_ERROR


def test_a_prompt_that_no_rule_matches(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no rule of the synthetic script matches turn 1"):
        streamed(client, [{"role": "user", "content": "something else"}])


def lines_of_ollama(server: Server, text: str, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": text}], **fields}
    with httpx.stream("POST", f"{server.url}/api/chat", json=body, timeout=60, verify=TLS) as reply:
        assert reply.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in reply.iter_lines()]


def test_lines_of_ollamas_api(server: Server) -> None:
    *calls, last = lines_of_ollama(server, "Read the files.", tools=TOOLS)
    assert "".join(each["message"]["content"] for each in calls) == "I read both."
    called = [call["function"] for each in calls for call in each["message"].get("tool_calls", ())]
    assert [call["arguments"]["path"] for call in called] == ["a b.ini", "ä\n{}"]
    assert (last["done"], last["done_reason"]) == (True, "stop")
    assert 0 < last["prompt_eval_duration"] <= last["total_duration"]
    *pieces, failure = lines_of_ollama(server, "fail")
    assert "".join(each["message"]["content"] for each in pieces) == SENT_BEFORE_THE_ERROR
    assert failure.keys() == {"error"}
    assert server.get("/api/tags").json()["models"][0]["name"] == MODEL
    unknown = server.post("/api/show", {"model": "x"})
    assert (unknown.status_code, list(unknown.json())) == (404, ["error"])


def _texts_of_gemini(chunks: list[Any]) -> str:
    parts = [part for each in chunks for part in each["candidates"][0]["content"]["parts"]]
    return "".join(part["text"] for part in parts)


@pytest.mark.parametrize("query", ["?alt=sse", ""])
def test_streams_of_geminis_api(server: Server, query: str) -> None:
    path = f"/v1beta/models/{MODEL}:streamGenerateContent{query}"

    def chunks(text: str) -> list[Any]:
        reply = server.post(path, {"contents": [{"parts": [{"text": text}]}]})
        if not query:
            return list(reply.json())
        blocks = [block for block in reply.text.split("\n\n") if block]
        return [json.loads(block.removeprefix("data: ")) for block in blocks]

    *pieces, last = chunks("What is the answer?")
    assert _texts_of_gemini(pieces) == '{"answer": 42}'
    assert last["candidates"][0]["finishReason"] == "STOP"
    assert last["usageMetadata"]["candidatesTokenCount"] > 3
    *pieces, failure = chunks("fail")
    assert _texts_of_gemini(pieces) == SENT_BEFORE_THE_ERROR
    assert failure["error"]["status"] == "INTERNAL"
    unknown = server.get("/v1beta/models/x").json()
    assert unknown["error"]["status"] == "NOT_FOUND"
