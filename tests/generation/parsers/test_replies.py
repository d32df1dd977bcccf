"""Replies whose text is parsed: events joined are the reply that is not streamed."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.generation.parsers.message import MessageParser
from penstock.generation.plan import RequestPlan
from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.streaming.stream import StreamError
from penstock.wire.frames import FinishReason
from tests.generation.delivery import collected_reply, streamed_events
from tests.generation.planning import chat_body, planners, tiny_tokenizer

HERMES = ChatTemplate({"default": "{{ messages[0].content }}<tool_call></think>"}, {})
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = '<think>hmm</think>\n\nWell\n<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'


def encode(text: str) -> list[int]:
    return tiny_tokenizer().encode(text, add_special_tokens=False)


def with_tools(**fields: Any) -> RequestPlan:
    return planners(template=HERMES).chat(chat_body(tools=TOOLS, max_tokens=512, **fields))


def rows_of(tokens: list[int]) -> list[list[int]]:
    return [[token] for token in tokens]


def joined(events: list[Any]) -> dict[str, Any]:
    """The message that events with deltas make."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for event in events:
        delta = event["choices"][0]["delta"]
        message["content"] += delta.get("content", "")
        message["reasoning"] += delta.get("reasoning", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["calls"])
                message["calls"].append([call["function"]["name"], ""])
            message["calls"][call["index"]][1] += call["function"]["arguments"]
    return message


@pytest.mark.parametrize("width", [1, 2, 7, 1000])
def test_calls_and_reasoning_are_streamed_as_they_are_collected(width: int) -> None:
    tokens = encode(CALL)
    rows = [tokens[start : start + width] for start in range(0, len(tokens), width)]
    *events, done = streamed_events(with_tools(stream=True), rows, FinishReason.STOP_TOKEN, chat=True)
    assert done == "[DONE]"
    message = joined(events)
    whole = collected_reply(with_tools(), tokens, FinishReason.STOP_TOKEN, chat=True)["choices"][0]
    assert message["calls"] == [["f", '{"x": "é"}']]
    assert [
        [call["function"]["name"], call["function"]["arguments"]] for call in whole["message"]["tool_calls"]
    ] == message["calls"]
    assert (whole["message"]["content"], message["content"]) == ("\n\nWell", "\n\nWell")
    assert (whole["message"]["reasoning"], message["reasoning"]) == ("hmm", "hmm")
    assert whole["finish_reason"] == events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    empty = [event for event in events[1:-1] if not event["choices"][0]["delta"]]
    assert not empty, "events that say nothing are not sent"


def test_arguments_come_while_they_are_written() -> None:
    *events, _ = streamed_events(
        with_tools(stream=True), rows_of(encode(CALL)), FinishReason.STOP_TOKEN, chat=True
    )
    pieces = [event for event in events if "tool_calls" in event["choices"][0]["delta"]]
    assert len(pieces) > 5
    first = pieces[0]["choices"][0]["delta"]["tool_calls"][0]
    assert (first["index"], first["type"], first["function"]["name"]) == (0, "function", "f")
    assert first["id"].startswith("call_")


def test_each_choice_has_calls_of_its_own() -> None:
    format = with_tools(n=2, temperature=1).format
    assert format is not None
    one, two = MessageParser(format), MessageParser(format)
    one.push("<tool_call>", last=False)
    assert two.push("text", last=True).content == "text"
    assert one.push('{"name": "f"}', last=True).calls[0].index == 0


def test_an_output_that_is_cut_short_is_not_ended_by_its_call() -> None:
    *events, _ = streamed_events(
        with_tools(stream=True), rows_of(encode(CALL)[:-20]), FinishReason.LENGTH, chat=True
    )
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_what_a_parser_holds_back_comes_before_an_error() -> None:
    tokens = encode("Well <tool_call>{")
    error = StreamError(500, "engine_error", "gone")
    *events, last = streamed_events(with_tools(stream=True), rows_of(tokens), None, error, chat=True)
    assert joined(events)["content"] == "Well <tool_call>{"
    assert last["error"]["code"] == "engine_error"


def test_after_the_reasoning_text_takes_the_fast_path() -> None:
    plan = planners(template=HERMES).chat(chat_body(stream=True, max_tokens=512))
    tokens = encode("<think>a</think>b c d e f")
    assert joined(streamed_events(plan, rows_of(tokens), chat=True)[:-1]) == {
        "content": "b c d e f",
        "reasoning": "a",
        "calls": [],
    }
    hidden = planners(template=HERMES).chat(chat_body(include_reasoning=False))
    message = collected_reply(hidden, tokens, chat=True)["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("b c d e f", None)
