"""Tool calls and reasoning through the openai client.

The synthetic engine draws tokens at random, so the calls stand in the message it continues and echoes: they
take the way of any output.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionToolParam

from tests.integration.server import SYNTHETIC, Server

TEMPLATE = """\
{%- if tools %}<|im_start|>system
Write calls as JSON between <tool_call> and </tool_call>.{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% set answer = message.content.split('</think>')[-1] %}
{{ message.content if loop.last else answer }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{%- if not (loop.last and continue_final_message) %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOOLS: list[ChatCompletionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a place.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
STRICT_TOOLS: list[ChatCompletionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {field: {"type": kind}},
                "required": [field],
                "additionalProperties": False,
            },
        },
    }
    for name, field, kind in (("celsius", "degrees", "boolean"), ("sign", "up", "boolean"))
]
OUTPUT = (
    "<think>Two places.</think>I look.\n"
    '<tool_call>{"name": "weather", "arguments": {"city": "Zürich"}}</tool_call>\n'
    '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
)
CALLS = [("weather", '{"city": "Zürich"}'), ("weather", '{"city": "Bern"}')]
ASKED: list[Any] = [{"role": "user", "content": "Weather in Zürich and Bern?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("tools")
    (directory / "template.jinja").write_text(TEMPLATE)
    options = (*SYNTHETIC, "--chat-template", str(directory / "template.jinja"))
    with Server(*options, directory=directory) as running:
        yield running


def continuing(client: openai.OpenAI, **fields: Any) -> dict[str, Any]:
    """Arguments of a request whose output is OUTPUT and a token that ends it."""
    extra = {"continue_final_message": True, "add_generation_prompt": False, "echo": True, "seed": 1}
    request = {
        "model": "m",
        "messages": [*ASKED, {"role": "assistant", "content": OUTPUT}],
        "tools": TOOLS,
        "max_tokens": 4,
    } | fields
    probe = client.chat.completions.create(**request, extra_body=extra | {"return_token_ids": True})
    first = probe.choices[0].model_extra["token_ids"][0]
    return request | {"extra_body": extra | {"stop_token_ids": [first]}}


def test_a_reply_with_calls(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(**continuing(client)).choices[0]
    calls = choice.message.tool_calls
    assert calls is not None
    assert [(call.function.name, call.function.arguments) for call in calls] == CALLS  # type: ignore[union-attr]
    assert len({call.id for call in calls}) == 2
    assert choice.message.content == "I look."
    assert choice.message.model_extra == {"reasoning": "Two places."}
    assert choice.finish_reason == "tool_calls"


def test_a_streamed_reply_with_calls(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**continuing(client)) as stream:
        kinds = [event.type for event in stream]
        choice = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.done" in kinds
    assert choice.message.tool_calls is not None
    assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == CALLS
    assert choice.message.content == "I look."
    assert choice.finish_reason == "tool_calls"


def test_one_call_where_no_more_are_wanted(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(**continuing(client, parallel_tool_calls=False)).choices[0]
    assert choice.message.tool_calls is not None
    assert len(choice.message.tool_calls) == 1


def test_text_where_no_calls_are_wanted(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(**continuing(client, tool_choice="none")).choices[0]
    assert choice.message.tool_calls is None
    assert choice.message.content == OUTPUT.partition("</think>")[2]


def test_a_conversation_goes_on_after_its_calls(client: openai.OpenAI) -> None:
    message = client.chat.completions.create(**continuing(client)).choices[0].message
    assert message.tool_calls
    results: list[Any] = [
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls
    ]
    messages = [*ASKED, message.model_dump(exclude_unset=True), *results]
    reply = client.chat.completions.create(model="m", messages=messages, tools=TOOLS, max_tokens=3)
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 3


def test_a_conversation_goes_on_after_a_call_that_is_no_json(client: openai.OpenAI) -> None:
    """As agents send it: what the model wrote, broken off by max_tokens, and the error as its result."""
    broken = '{"city": "Zür'
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": broken}}
    messages: list[Any] = [
        *ASKED,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Invalid JSON: unterminated string."},
    ]
    reply = client.chat.completions.create(
        model="m", messages=messages, tools=TOOLS, max_tokens=3, extra_body={"return_token_ids": True}
    )
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 3
    ids = {"tokens": (reply.model_extra or {})["prompt_token_ids"]}
    prompt = client.with_options(base_url=str(client.base_url).removesuffix("v1/"))
    text = prompt.post("/detokenize", body=ids, cast_to=dict[str, str])["prompt"]
    assert json.dumps(broken, ensure_ascii=False) in text


def test_a_model_without_a_format_of_calls_answers_in_text_with_a_warning(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    history = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": "c1",
            "name": "weather",
            "content": [{"type": "text", "text": "sun"}],
        },
    ]
    body = {"messages": history, "tools": TOOLS, "max_tokens": 3, "temperature": 0}
    with Server(*SYNTHETIC, "--tool-call-parser", "none", directory=tmp_path) as server:
        for fields in ({}, {"tool_choice": "auto"}, {"stream": True}):
            reply = server.post("/v1/chat/completions", body | fields)
            assert reply.status_code == 200
            assert reply.headers["warning"].startswith('299 penstock "tools: ')
            assert "tool_calls" not in reply.text
        for fields in ({"tool_choice": "none"}, {"tools": []}):
            assert "warning" not in server.post("/v1/chat/completions", body | fields).headers


@pytest.mark.slow
def test_a_named_function_is_called(tiny_llama: Server) -> None:
    with openai.OpenAI(base_url=f"{tiny_llama.url}/v1", api_key="none", max_retries=0) as client:
        options: dict[str, Any] = {
            "model": "tiny-llama",
            "messages": ASKED,
            "tools": STRICT_TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "celsius"}},
            "temperature": 0,
            "max_tokens": 200,
        }
        choice = client.chat.completions.create(**options).choices[0]
        assert choice.finish_reason == "stop"
        [call] = choice.message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "celsius"
        assert set(json.loads(call.function.arguments)) == {"degrees"}
        assert choice.message.content is None
        with client.chat.completions.stream(**options) as stream:
            for _ in stream:
                pass
            [streamed] = stream.get_final_completion().choices[0].message.tool_calls or []
        assert streamed.function.arguments == call.function.arguments


@pytest.mark.slow
def test_a_required_call_is_of_one_of_the_tools(tiny_llama: Server) -> None:
    with openai.OpenAI(base_url=f"{tiny_llama.url}/v1", api_key="none", max_retries=0) as client:
        for seed in range(4):
            choice = client.chat.completions.create(
                model="tiny-llama",
                messages=ASKED,
                tools=STRICT_TOOLS,
                tool_choice="required",
                parallel_tool_calls=False,
                seed=seed,
                max_tokens=300,
            ).choices[0]
            assert choice.finish_reason == "tool_calls"
            [call] = choice.message.tool_calls or []
            assert call.type == "function"
            fields = {"celsius": {"degrees"}, "sign": {"up"}}
            assert set(json.loads(call.function.arguments)) == fields[call.function.name]


def test_an_engine_without_grammars_refuses_forced_calls(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="synthetic engine"):
        client.chat.completions.create(model="m", messages=ASKED, tools=TOOLS, tool_choice="required")


def test_an_engine_without_grammars_serves_strict_functions(client: openai.OpenAI) -> None:
    strict: Any = [{"type": "function", "function": {**STRICT_TOOLS[0]["function"], "strict": True}}]
    reply = client.chat.completions.create(model="m", messages=ASKED, tools=strict, max_tokens=4)
    assert reply.choices[0].finish_reason in ("length", "stop", "tool_calls")
