"""The openai package, as applications call it; both major versions run these tests."""

from __future__ import annotations

import asyncio
import datetime
import enum
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

MODEL = "penstock-demo"
ASKED: list[Any] = [{"role": "user", "content": "What does os.path.join do?"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a place.",
            "parameters": {
                "type": "object",
                "properties": {"celsius": {"type": "boolean"}, "days": {"type": "integer", "maximum": 9}},
                "required": ["celsius", "days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Leaf(BaseModel):
    kind: Literal["leaf"]
    heavy: bool


class Branch(BaseModel):
    kind: Literal["branch"]
    left: Annotated[Leaf | Branch, Field(discriminator="kind")] | None
    size: int = Field(ge=0, le=99)


class Everything(BaseModel):
    """What pydantic makes $defs, references, unions, formats and patterns of."""

    colour: Colour
    maybe: bool | None
    day: datetime.date
    code: str = Field(pattern=r"^[A-Z]{2}-[0-9]{3}$")
    either: int | bool
    pair: tuple[bool, bool]
    table: list[list[Colour]] = Field(max_length=2)
    leaf: Leaf


def test_a_parsed_answer(client: openai.OpenAI) -> None:
    for seed in range(3):
        reply = client.chat.completions.parse(
            model=MODEL, messages=ASKED, response_format=Everything, max_tokens=600, seed=seed
        )
        assert isinstance(reply.choices[0].message.parsed, Everything)


def test_a_recursive_answer(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(
        model=MODEL, messages=ASKED, response_format=Branch, max_tokens=1200, temperature=0
    )
    assert reply.choices[0].message.parsed


def test_a_streamed_parsed_answer(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=ASKED, response_format=Leaf, max_tokens=200, seed=1
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "content.done", "chunk"} <= kinds
    assert isinstance(final.choices[0].message.parsed, Leaf)


class Weather(BaseModel):
    """Weather of a place."""

    celsius: bool
    days: Literal[1, 2, 3]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Weather"}}])
def test_a_parsed_call(client: openai.OpenAI, choice: Any) -> None:
    reply = client.chat.completions.parse(
        model=MODEL,
        messages=ASKED,
        tools=[openai.pydantic_function_tool(Weather)],
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=200,
    )
    [call] = reply.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)


def test_tools_without_a_choice(client: openai.OpenAI) -> None:
    """The model decides; what it says is the same streamed and whole."""
    fields: dict[str, Any] = {"model": MODEL, "messages": ASKED, "tools": TOOLS, "temperature": 0}
    fields["max_tokens"] = 300
    whole = client.chat.completions.create(**fields).choices[0]
    assert whole.message.content or whole.message.tool_calls
    with client.chat.completions.stream(**fields) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0]
    assert streamed.message.content == whole.message.content
    assert bool(streamed.message.tool_calls) == bool(whole.message.tool_calls)


def test_a_conversation_with_results_of_calls(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(
        model=MODEL, messages=ASKED, tools=TOOLS, tool_choice="required", max_tokens=300
    ).choices[0]
    assert first.finish_reason == "tool_calls"
    assert first.message.tool_calls
    messages = [*ASKED, first.message]
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": ""} for call in first.message.tool_calls
    ]
    reply = client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=9
    )
    assert reply.choices[0].message.content


def test_what_applications_send_besides(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "developer", "content": "Be brief."}, *ASKED],
        max_completion_tokens=12,
        n=2,
        seed=3,
        temperature=0.7,
        top_p=0.9,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        logit_bias={"5": -1},
        logprobs=True,
        top_logprobs=2,
        stop=["\n\n", "zzz"],
        user="somebody",
        metadata={"a": "b"},
        reasoning_effort="low",
        parallel_tool_calls=True,
        store=False,
        service_tier="auto",
        verbosity="low",
        prompt_cache_key="k",
        safety_identifier="s",
        modalities=["text"],
        response_format={"type": "text"},
        extra_headers={"X-Request-Id": "mine"},
        extra_body={"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1, "chat_template_kwargs": {"a": 1}},
    )
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert all(choice.logprobs and choice.logprobs.content for choice in reply.choices)
    assert reply.usage
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


NULLABLE = """tools tool_choice parallel_tool_calls stop n seed temperature top_p logprobs top_logprobs
    response_format stream stream_options user metadata store service_tier reasoning_effort verbosity
    max_completion_tokens frequency_penalty presence_penalty logit_bias functions function_call audio
    modalities prediction web_search_options prompt_cache_key safety_identifier""".split()  # noqa: SIM905


@pytest.mark.parametrize("stream", [False, True])
def test_null_is_as_absent(client: openai.OpenAI, stream: bool) -> None:
    fields: dict[str, Any] = dict.fromkeys(NULLABLE) | {"stream": stream}
    message = ASKED[0] | dict.fromkeys(("name", "refusal", "audio", "tool_calls", "function_call"))
    client.chat.completions.create(model=MODEL, messages=[message], max_tokens=2, extra_body=fields)


@pytest.mark.parametrize(
    ("outputs", "matches"),
    [
        ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"regex": "[0-9]{3}"}, str.isdigit),
        ({"json": Leaf.model_json_schema()}, Leaf.model_validate_json),
    ],
)
def test_vllms_structured_outputs(client: openai.OpenAI, outputs: Any, matches: Any) -> None:
    extra = {"structured_outputs": outputs}
    reply = client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=100, extra_body=extra)
    assert matches(reply.choices[0].message.content)


@pytest.mark.parametrize(
    ("field", "value", "hint"),
    [
        ("guided_json", {"type": "boolean"}, "structured_outputs.*json"),
        ("guided_choice", ["a"], "structured_outputs.*choice"),
        ("guided_regex", "[0-9]", "structured_outputs.*regex"),
        ("guided_grammar", "root ::= 'a'", "structured_outputs.*grammar"),
        ("ebnf", "root ::= 'a'", "structured_outputs.*grammar"),
    ],
)
def test_an_older_name_of_a_constraint_is_no_free_text(
    client: openai.OpenAI, field: str, value: Any, hint: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=hint) as raised:
        client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=4, extra_body={field: value})
    assert raised.value.param == field


def test_a_part_of_an_unknown_type_is_a_clear_error(client: openai.OpenAI) -> None:
    part = {"type": "hologram"}
    with pytest.raises(openai.BadRequestError, match="hologram"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": [part]}])  # type: ignore[list-item]


def test_a_conversation_that_is_too_long_is_a_clear_error(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "word " * 4000}]
    with pytest.raises(openai.BadRequestError, match="2048"):
        client.chat.completions.create(model=MODEL, messages=messages)


def test_a_stream_that_is_left(client: openai.OpenAI) -> None:
    for _ in range(3):
        with client.chat.completions.create(model=MODEL, messages=ASKED, stream=True) as stream:
            next(iter(stream))
    assert client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=2).choices


def test_async_streams_side_by_side(url: str) -> None:
    async def text(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=ASKED, max_tokens=20, seed=seed, stream=True
        )
        return "".join([event.choices[0].delta.content or "" async for event in stream])

    async def whole(client: openai.AsyncOpenAI, seed: int) -> str | None:
        reply = await client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=20, seed=seed)
        return reply.choices[0].message.content

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            streamed = await asyncio.gather(*(text(client, seed) for seed in range(4)))
            assert streamed == await asyncio.gather(*(whole(client, seed) for seed in range(4)))

    asyncio.run(main())


def test_raw_and_streaming_responses(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=ASKED, max_tokens=2)
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().choices
    with client.chat.completions.with_streaming_response.create(
        model=MODEL, messages=ASKED, max_tokens=2, stream=True
    ) as reply:
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[0].removeprefix("data: "))["object"] == "chat.completion.chunk"


def test_legacy_completions(client: openai.OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt=["The with", "A list"], max_tokens=4, logprobs=1)
    assert len(reply.choices) == 2
    assert client.models.retrieve(MODEL).id in [model.id for model in client.models.list()]
