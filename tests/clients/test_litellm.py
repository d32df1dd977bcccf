"""LiteLLM, with the providers openai and hosted_vllm."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
import pytest

from tests.clients.shapes import MODEL, QUESTION, Answer

TOOLS = [{"type": "function", "function": {"name": "answer", "parameters": Answer.model_json_schema()}}]


@pytest.fixture(params=["openai", "hosted_vllm"])
def fields(url: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    return {
        "model": f"{request.param}/{MODEL}",
        "api_base": url,
        "api_key": "none",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 300,
        "temperature": 0,
        "num_retries": 0,
    }


def test_an_answer_streamed_and_not(fields: dict[str, Any]) -> None:
    whole = litellm.completion(**fields)
    assert whole.usage.completion_tokens
    chunks = list(litellm.completion(**fields, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content == text


def test_async(fields: dict[str, Any]) -> None:
    assert asyncio.run(litellm.acompletion(**fields)).choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call(fields: dict[str, Any], stream: bool) -> None:
    reply = litellm.completion(
        **fields, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, stream=stream
    )
    if stream:
        reply = litellm.stream_chunk_builder(list(reply))
    assert reply.choices[0].finish_reason == "tool_calls"
    for call in reply.choices[0].message.tool_calls:
        Answer.model_validate_json(call.function.arguments)


def test_tools_without_a_choice(fields: dict[str, Any]) -> None:
    message = litellm.completion(**fields, tools=TOOLS).choices[0].message
    assert message.content or message.tool_calls


def test_structured_output(fields: dict[str, Any]) -> None:
    reply = litellm.completion(**fields, response_format=Answer)
    Answer.model_validate_json(reply.choices[0].message.content)
    reply = litellm.completion(**fields, response_format={"type": "json_object"})
    assert isinstance(json.loads(reply.choices[0].message.content), dict)


def test_a_message_goes_back_as_it_came(fields: dict[str, Any]) -> None:
    first = litellm.completion(**fields).choices[0].message
    messages = [*fields["messages"], first, {"role": "user", "content": "And then?"}]
    assert litellm.completion(**fields | {"messages": messages}).choices[0].message.content


def test_text_completion(fields: dict[str, Any]) -> None:
    if fields["model"].startswith("openai"):
        fields = fields | {"model": f"text-completion-openai/{MODEL}"}
    del fields["messages"]
    assert litellm.text_completion(prompt="The with statement", **fields | {"max_tokens": 5}).choices[0].text


def test_an_error_keeps_its_class(fields: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**fields | {"max_tokens": -1})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**fields | {"model": "openai/none"})
