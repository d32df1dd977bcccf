"""Events and whole replies of messages."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.dialects.messages.thinking import thinking_text
from penstock.http.errors import ApiError
from penstock.streaming.stream import StreamError
from penstock.wire.frames import FinishReason
from tests.dialects.messages.serving import (
    WEATHER,
    collected,
    dialect,
    joined,
    plan,
    read_events,
    streamed,
    tables,
    tokens_of,
)
from tests.generation.replying import PROMPT, Desk, in_loop

THINKING = {"type": "enabled", "budget_tokens": 2000}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Zürich"}}</tool_call>'


def reply(text: str, finish: FinishReason = FinishReason.EOS, **fields: Any) -> dict[str, Any]:
    """The whole reply, which is compared with a stream of one token per row."""
    tokens = [*tokens_of(text), 1] if finish is FinishReason.EOS else tokens_of(text)
    whole = collected(plan(**fields), tokens, finish)
    same = joined(streamed(plan(stream=True, **fields), [[token] for token in tokens], finish))
    assert without_ids(same) == without_ids(whole)
    return whole


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Calls get new ids in every reply."""
    return message | {"content": [block | {"id": None} for block in message["content"]]}


def test_a_text_is_one_block() -> None:
    message = reply("Good morning.")
    assert message["content"] == [{"type": "text", "text": "Good morning.", "citations": None}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert message["usage"]["input_tokens"] == PROMPT.length
    assert message["id"] == "msg_r"


def test_the_events_are_in_order() -> None:
    tokens = tokens_of("def main(): pass")
    events = streamed(plan(stream=True), [[token] for token in tokens], FinishReason.LENGTH)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[2:-3] == ["content_block_delta"] * len(tokens)
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[0]["message"]["usage"]["input_tokens"] == PROMPT.length
    assert events[-2]["usage"]["output_tokens"] == len(tokens)


def test_thinking_text_and_calls_are_blocks_of_their_own() -> None:
    output = f"<think>\nTwo places.\n</think>\n\nI look.\n{CALL}\n{CALL}"
    message = reply(output, thinking=THINKING, tools=[WEATHER])
    thinking, text, first, second = message["content"]
    assert thinking["type"] == "thinking"
    assert thinking["thinking"] == "\nTwo places.\n"
    assert thinking_text("", thinking["signature"]) == ""
    assert text == {"type": "text", "text": "\n\nI look.", "citations": None}
    assert (first["name"], first["input"]) == ("weather", {"city": "Zürich"})
    assert first["id"].startswith("toolu_")
    assert first["id"] != second["id"]
    assert message["stop_reason"] == "tool_use"


def test_white_space_between_blocks_is_none() -> None:
    message = reply(f"<think>\n\n</think>\n\n{CALL}", thinking=THINKING, tools=[WEATHER])
    assert [block["type"] for block in message["content"]] == ["tool_use"]
    assert reply("\n\n")["content"] == [{"type": "text", "text": "\n\n", "citations": None}]
    assert reply("")["content"] == []


def test_thinking_that_was_not_asked_for_is_dropped() -> None:
    message = reply("<think>Hm.</think>Yes.")
    assert message["content"] == [{"type": "text", "text": "Yes.", "citations": None}]


def test_omitted_thinking_is_in_the_signature() -> None:
    thinking = {"type": "adaptive", "display": "omitted"}
    message = reply("<think>Hm, ä.</think>Yes.", thinking=thinking)
    [block, text] = message["content"]
    assert block["thinking"] == ""
    assert thinking_text("", block["signature"]) == "Hm, ä."
    assert text["text"] == "Yes."


def test_at_most_one_call() -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = reply(CALL + CALL, tools=[WEATHER], tool_choice=choice)
    assert [block["type"] for block in message["content"]] == ["tool_use"]


def test_why_it_stopped() -> None:
    assert reply("Good morning.", FinishReason.LENGTH)["stop_reason"] == "max_tokens"
    assert reply(CALL, FinishReason.LENGTH, tools=[WEATHER])["stop_reason"] == "max_tokens"
    stopped = reply("Good morning.", stop_sequences=["x", "mor"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "mor")
    assert stopped["content"][0]["text"] == "Good "


def test_the_context_may_end_it_before_max_tokens() -> None:
    planned = plan(max_tokens=64_000)
    planned.max_model_len = PROMPT.length + 3
    tokens = tokens_of("def main()")[:3]
    assert collected(planned, tokens, FinishReason.LENGTH)["stop_reason"] == "model_context_window_exceeded"


def test_a_named_call_ends_with_tool_use() -> None:
    choice = {"type": "tool", "name": "weather"}
    message = reply('{"city": "Bern"}', tools=[WEATHER], tool_choice=choice)
    assert message["content"][0]["input"] == {"city": "Bern"}
    assert message["stop_reason"] == "tool_use"


def test_a_call_that_max_tokens_cuts() -> None:
    tokens = tokens_of('<tool_call>{"name": "weather", "arguments": {"city": "Zü')
    message = collected(plan(tools=[WEATHER]), tokens, FinishReason.LENGTH)
    assert message["content"][0]["input"] == {}
    assert message["stop_reason"] == "max_tokens"


def test_errors_in_a_stream() -> None:
    def run() -> None:
        desk, planned = Desk(tables()), plan(stream=True)
        reply, sink = desk.streamed(planned, format=dialect().reply_format(planned, "r"))
        desk.deliver(desk.rows(0, [tokens_of("def")]))
        reply.send_keep_alive(0.0, 1.0)
        desk.streams.fail(0, 0, StreamError(503, "engine_died", "The engine is gone."))
        *_, ping, error = read_events(sink)
        assert ping == {"type": "ping"}
        assert error == {
            "type": "error",
            "error": {"type": "overloaded_error", "message": "The engine is gone."},
            "request_id": "r",
        }

    in_loop(run)


FRAGMENTS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    CALL,
    '{"name": "weather", "arguments": {}}',
    "ä€😀",
    " ",
    "\n\n",
    "def main():",
    '\\"\t',
)


@settings(max_examples=50)
@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=8),
    st.data(),
    st.sampled_from([FinishReason.EOS, FinishReason.LENGTH]),
    st.sampled_from([None, THINKING, {"type": "adaptive", "display": "omitted"}]),
)
def test_however_an_output_is_cut_its_events_are_the_whole_reply(
    fragments: list[str], data: st.DataObject, finish: FinishReason, thinking: dict[str, Any] | None
) -> None:
    fields: dict[str, Any] = {"tools": [WEATHER], "thinking": thinking}
    tokens = [*tokens_of("".join(fragments)), 1]
    cuts = sorted(data.draw(st.lists(st.integers(1, len(tokens)), max_size=len(tokens), unique=True)))
    parts = [tokens[start:end] for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]
    message = collected(plan(**fields), tokens, finish)
    events = streamed(plan(stream=True, **fields), [part for part in parts if part], finish)
    assert without_ids(joined(events)) == without_ids(message)


@pytest.mark.parametrize("status", [400, 500])
def test_error_bodies(status: int) -> None:
    body = json.loads(dialect().error_body(ApiError(status, "No."), "r"))
    kind = {400: "invalid_request_error", 500: "api_error"}[status]
    assert body == {"type": "error", "error": {"type": kind, "message": "No."}, "request_id": "r"}


def test_threads_are_refused_as_clients_understand_it() -> None:
    """The tool runner of the anthropic package then sends whole conversations."""
    with pytest.raises(ApiError, match="thread") as raised:
        plan(thread={"type": "create"})
    error = json.loads(dialect().error_body(raised.value, "r"))["error"]
    assert error["type"] == "invalid_request_error"
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def test_the_message_of_an_error_names_the_field() -> None:
    def message(error: ApiError) -> str:
        text: str = json.loads(dialect().error_body(error, "r"))["error"]["message"]
        return text

    field = "output_config.format.schema"
    assert message(ApiError(400, "It matches no text.", param=field)) == f"{field}: It matches no text."
    assert message(ApiError(400, "stop is empty.", param="stop")) == "stop is empty."


@pytest.mark.parametrize(
    ("arguments", "input"),
    [
        ('{"s": "a\n\tb"}', {"s": "a\n\tb"}),
        ('{"n": 1.5, "i": 12}', {"n": 1.5, "i": 12}),
        ('{"i": 123456789012345678901234567890}', {"i": 123456789012345678901234567890}),
        ('{"s": "x",}', {}),
        ('{"n": 1e400}', {}),
        ('{"n": NaN}', {}),
        ('{"n": -Infinity}', {}),
        ("[1]", {}),
        ('{"s": "cu', {}),
        ("[" * 20_000, {}),
    ],
)
def test_arguments_that_are_no_json_are_an_empty_input(arguments: str, input: dict[str, Any]) -> None:
    choice = {"type": "tool", "name": "weather"}
    message = collected(
        plan(tools=[WEATHER], tool_choice=choice), [*tokens_of(arguments), 1], FinishReason.EOS
    )
    assert message["content"][0]["input"] == input
