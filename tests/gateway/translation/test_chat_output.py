"""The outputs of chat servers, which differ in how they write them."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.translation.chat_output import MAX_ITEMS, ChatOutput, TranslationError
from penstock.generation.parsers.delta import CallDelta, Delta, TextDelta
from penstock.generation.parsers.message import MessageFormat
from penstock.generation.replies.token_usage import TokenUsage

CUSTOM = MessageFormat(custom=frozenset({"patch"}))


def chunk(finish: str | None = None, **delta: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return json.dumps({"choices": [choice]}, ensure_ascii=False).encode()


def call(**fields: Any) -> bytes:
    return chunk(tool_calls=[fields])


def read(*chunks: bytes, format: MessageFormat = CUSTOM) -> Delta:
    """The whole output."""
    output, found = ChatOutput(format), Delta()
    for each in chunks:
        found.add(output.read(each))
    found.add(output.end())
    return found


def test_reasoning_has_two_names_or_is_a_part() -> None:
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "c"}]}, {"type": "text", "text": "d"}]
    found = read(chunk(reasoning="a"), chunk(reasoning_content="b"), chunk(content=parts))
    assert (found.reasoning, found.content) == ("abc", "d")
    assert read(chunk(reasoning="a", content="b"), format=MessageFormat(show_reasoning=False)) == Delta(
        content="b"
    )


def test_calls_by_index_by_id_and_repeated_names() -> None:
    found = read(
        call(index=0, id="a", function={"name": "f", "arguments": ""}),
        call(index=0, id="a", function={"name": "f", "arguments": '{"x":'}),
        call(index=0, function={"arguments": "1}"}),
        call(index=1, id="b", function={"name": "f", "arguments": "{}"}),
        call(index=1, id="c", function={"name": "g", "arguments": "{}"}),
        call(function={"arguments": " "}),
    )
    assert [(each.id, each.name, each.arguments) for each in found.calls] == [
        ("a", "f", '{"x":1}'),
        ("b", "f", "{}"),
        ("c", "g", "{} "),
    ]


def test_calls_without_ids_and_arguments_get_some() -> None:
    whole = {"content": "", "tool_calls": [{"function": {"name": "f"}}, {"function": {"name": "f"}}]}
    output = ChatOutput(CUSTOM)
    delta = output.read(json.dumps({"choices": [{"message": whole, "finish_reason": "stop"}]}).encode())
    delta.add(output.end())
    assert [each.arguments for each in delta.calls] == ["{}", "{}"]
    assert len({each.id for each in delta.calls}) == 2


@given(st.text(max_size=20), st.lists(st.integers(0, 60)))
def test_the_input_of_a_custom_tool_in_pieces(text: str, cuts: list[int]) -> None:
    """Also where a piece cuts an escape."""
    arguments = json.dumps({"input": text})
    places = sorted({0, len(arguments), *(min(cut, len(arguments)) for cut in cuts)})
    pieces = [arguments[start:end] for start, end in pairwise(places)]
    found = read(
        call(index=0, id="a", function={"name": "patch", "arguments": ""}),
        *(call(index=0, function={"arguments": piece}) for piece in pieces),
    )
    assert found.pieces == [CallDelta(0, "patch", text, "a", custom=True)]


@pytest.mark.parametrize(
    ("finish", "wanted"),
    [("stop", b"stop"), ("length", b"length"), ("content_filter", b"content_filter"), ("eos_token", b"stop")],
)
def test_why_it_ends(finish: str, wanted: bytes) -> None:
    output = ChatOutput(CUSTOM)
    output.read(chunk(finish, content="a"))
    assert output.finish_reason == wanted
    assert not output.read(chunk(content="more"))


def test_usage() -> None:
    output = ChatOutput(CUSTOM)
    usage = {
        "prompt_tokens": 5,
        "completion_tokens": 7.0,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }
    output.read(json.dumps({"choices": [], "usage": usage}).encode())
    assert output.usage == TokenUsage(5, 7, 4, 3)
    output.read(b'{"choices":[],"usage":{"prompt_tokens":-1,"completion_tokens":true}}')
    assert output.usage == TokenUsage(5, 7, 4, 3)


def test_a_pair_of_surrogates_that_is_cut() -> None:
    found = read(
        b'{"choices":[{"delta":{"content":"\\ud83d"}}]}', b'{"choices":[{"delta":{"content":"\\ude00"}}]}'
    )
    assert found.pieces == [TextDelta("\ufffd\ufffd")]


@pytest.mark.parametrize(
    "chunks",
    [
        [b"\xff"],
        [b"[]"],
        [chunk(content=3)],
        [chunk(content=[{"text": "a"}])],
        [
            call(index=0, function={"name": "f"}),
            chunk(content="a"),
            call(index=0, function={"arguments": "a"}),
        ],
        [chunk(reasoning="a"), chunk(content="a")] * MAX_ITEMS,
    ],
)
def test_what_is_no_output(chunks: list[bytes]) -> None:
    with pytest.raises(TranslationError) as raised:
        read(*chunks)
    assert (raised.value.error.status, raised.value.own) == (502, False)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        ({"message": "m", "type": "t", "code": None}, 502, "t"),
        ({"message": "m", "code": 429}, 429, "upstream_failed"),
        ({"message": "m", "code": "c", "type": "t"}, 502, "c"),
        ("m", 502, "upstream_failed"),
    ],
)
def test_errors_of_the_server(error: Any, status: int, code: str) -> None:
    with pytest.raises(TranslationError) as raised:
        read(json.dumps({"error": error}).encode())
    found = raised.value.error
    assert (raised.value.own, found.status, found.code, found.message) == (True, status, code, "m")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("This model's maximum context length is 8 tokens. However, you requested 9.", "input_tokens"),
        ("the request exceeds the available context size, try increasing it", "input_tokens"),
        ("'max_tokens' is too large: 9. This model's maximum context length is 8 tokens.", None),
        ("no", None),
    ],
)
def test_a_prompt_that_is_too_long(message: str, param: str | None) -> None:
    """Clients shorten the conversation only if they recognize it."""
    with pytest.raises(TranslationError) as raised:
        read(json.dumps({"error": {"message": message, "code": 400}}).encode())
    assert raised.value.error.param == param
