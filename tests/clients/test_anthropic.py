"""Anthropic's own client: messages, tools, counts and models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.clients.shapes import MODEL, QUESTION, Answer

TOOL: Any = {
    "name": "answer",
    "description": "Say what a function does.",
    "input_schema": Answer.model_json_schema(),
}


pytestmark = pytest.mark.parametrize(
    "url", ["direct", "gateway", "translated"], indirect=True, scope="session"
)


@pytest.fixture
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0) as made:
        yield made


def fields(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    return {"model": MODEL, "max_tokens": 60, "messages": messages, "extra_body": {"temperature": 0}} | more


def streamed(client: anthropic.Anthropic, **more: Any) -> Any:
    with client.messages.stream(**fields(**more)) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == "".join(block.text for block in message.content if block.type == "text")
    return message


def test_an_answer_streamed_and_not(client: anthropic.Anthropic, request: pytest.FixtureRequest) -> None:
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    whole = client.messages.create(**fields(system=system))
    same = streamed(client, system=system)
    assert whole.content[0].text
    assert same.content[0].text == whole.content[0].text
    assert same.stop_reason == whole.stop_reason
    assert same.usage.output_tokens == whole.usage.output_tokens
    read = [each.input_tokens + (each.cache_read_input_tokens or 0) for each in (same.usage, whole.usage)]
    asked: Any = {"model": MODEL, "system": system, "messages": fields()["messages"]}
    if request.node.callspec.params["url"] == "translated":
        with pytest.raises(anthropic.NotFoundError, match="tokens are not counted"):
            client.messages.count_tokens(**asked)
        assert read[0] == read[1] > 0
    else:
        assert read == [client.messages.count_tokens(**asked).input_tokens] * 2


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "answer"}])
def test_a_round_of_a_tool(client: anthropic.Anthropic, choice: Any) -> None:
    more = {"tools": [TOOL], "tool_choice": choice | {"disable_parallel_tool_use": True}}
    whole = client.messages.create(**fields(**more))
    message = streamed(client, **more)
    assert message.stop_reason == "tool_use"
    [call] = message.content
    assert call.input == whole.content[0].input
    Answer.model_validate(call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "thanks"}
    messages = [
        *fields()["messages"],
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result, {"type": "text", "text": QUESTION}]},
    ]
    assert client.messages.create(**fields(messages=messages, tools=[TOOL])).content


def test_stop_sequences(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**fields(stop_sequences=["e"]))
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "e")


def test_errors_have_their_classes(client: anthropic.Anthropic) -> None:
    block = {"type": "hologram"}
    with pytest.raises(anthropic.BadRequestError, match="blocks of type 'hologram' are not supported"):
        client.messages.create(**fields(messages=[{"role": "user", "content": [block]}]))
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**fields(messages=[{"role": "user", "content": "word " * 4000}]))
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**fields(model="none"))
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["type"] == "error"


def test_the_models(client: anthropic.Anthropic, url: str) -> None:
    assert MODEL in [model.id for model in client.models.list()]
