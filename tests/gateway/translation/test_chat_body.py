"""What chat servers get of a conversation: forms that all of them take."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.gateway.translation.chat_body import tool_fields
from penstock.gateway.translation.messages_request import translate_messages
from penstock.gateway.translation.responses_request import translate_response
from penstock.generation.request.schemas import Function, Tool
from penstock.http.errors import ApiError, encode_json

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
SHOWN = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def of_messages(messages: list[Any], **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "max_tokens": 5, "messages": messages, **fields}
    return translate_messages(encode_json(body), "r").fields


def of_response(given: Any, **fields: Any) -> dict[str, Any]:
    return translate_response(encode_json({"model": "m", "input": given, **fields}), "r").fields


def test_a_round_of_a_tool_with_a_picture() -> None:
    said = of_messages(
        [
            {"role": "user", "content": [{"type": "text", "text": "Look."}, IMAGE]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "see", "input": {"a": "ä"}},
                    {"type": "tool_use", "id": "t2", "name": "see", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [IMAGE]},
                    {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True},
                    {"type": "text", "text": "Well?"},
                ],
            },
        ],
        system=[{"type": "text", "text": "S1"}, {"type": "text", "text": "S2"}],
    )["messages"]
    follows = "[An image, which the next message has.]"
    assert said == [
        {"role": "system", "content": "S1\nS2"},
        {"role": "user", "content": [{"type": "text", "text": "Look."}, SHOWN]},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "see", "arguments": '{"a":"ä"}'}},
                {"id": "t2", "type": "function", "function": {"name": "see", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": follows},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no"},
        {"role": "user", "content": [SHOWN, {"type": "text", "text": "Well?"}]},
    ]


def test_instructions_in_the_middle_and_turns_in_a_row() -> None:
    message = {"type": "message", "role": "user", "content": "B"}
    image = {"type": "input_image", "image_url": "https://a/b.png", "detail": "low"}
    fields = of_response(
        [
            {"role": "developer", "content": "D"},
            {"role": "user", "content": "A"},
            message,
            {"role": "system", "content": "late"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": ""},
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [{"type": "input_text", "text": "t"}, image],
            },
        ],
        instructions="I",
    )
    assert [each["role"] for each in fields["messages"]] == ["system", "user", "assistant", "tool", "user"]
    assert fields["messages"][0]["content"] == "I\n\nD"
    assert fields["messages"][1]["content"] == "A\n\nB\n\n<system>\nlate\n</system>"
    assert fields["messages"][2]["content"] is None
    assert fields["messages"][2]["tool_calls"][0]["function"]["arguments"] == "{}"
    assert fields["messages"][4]["content"] == [
        {"type": "image_url", "image_url": {"url": "https://a/b.png", "detail": "low"}}
    ]


def test_fields() -> None:
    schema = {"type": "object"}
    format = {"type": "json_schema", "name": "n", "schema": schema, "strict": False}
    fields = of_response(
        "a",
        text={"format": format, "verbosity": "low"},
        reasoning={"effort": "xhigh"},
        max_output_tokens=9,
        temperature=0,
        store=False,
        prompt_cache_key="k",
        client_metadata={"a": "b"},
        parallel_tool_calls=False,
        tools=[{"type": "function", "name": "f", "strict": False}],
    )
    assert fields == {
        "model": "m",
        "temperature": 0.0,
        "messages": [{"role": "user", "content": "a"}],
        "tools": [
            {
                "type": "function",
                "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
            }
        ],
        "parallel_tool_calls": False,
        "max_tokens": 9,
        "reasoning_effort": "high",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": schema, "strict": False},
        },
    }
    wanted = {"type": "json_schema", "schema": schema}
    fields = of_messages(
        [{"role": "user", "content": "a"}],
        stop_sequences=["x"],
        output_config={"format": wanted, "effort": "low"},
    )
    assert (fields["stop"], fields["reasoning_effort"]) == (["x"], "low")
    assert fields["response_format"]["json_schema"] == {"name": "output", "schema": schema, "strict": True}


def test_only_allowed_tools_are_offered() -> None:
    tools = [Tool(function=Function(name=name)) for name in ("f", "g")]
    listed = [{"type": "function", "function": {"name": "g"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": listed}}
    fields = tool_fields(tools, choice, one_call=False)
    assert [each["function"]["name"] for each in fields["tools"]] == ["g"]
    assert fields["tool_choice"] == "required"
    with pytest.raises(ApiError, match="no tools to choose from"):
        tool_fields([], "required", one_call=False)
