"""What each format says, and what is none of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import pytest

from penstock.dialects.chat.reply import delta_fields, message_fields
from penstock.generation.parsers.calls import CallParser
from penstock.generation.parsers.delta import CallDelta, Delta
from penstock.generation.parsers.formats import REASONING_FORMATS
from penstock.generation.parsers.message import MessageFormat, MessageParser
from penstock.generation.parsers.named_call import NamedCallParser
from penstock.generation.parsers.reasoning import ReasoningParser
from penstock.generation.request.schemas import Function, Tool
from penstock.generation.request.tool_choice import parse_tool_choice
from tests.generation.parsers.test_split import HERMES, LLAMA3, whole
from tests.generation.replying import without_nulls

WEATHER = '{"name": "weather", "arguments": {"city": "Bärn", "days": [1, 2]}}'
ARGUMENTS = '{"city": "Bärn", "days": [1, 2]}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"<tool_call>\n{WEATHER}\n</tool_call>", "", [("weather", ARGUMENTS)]),
        (f"Let me see.\n<tool_call>{WEATHER}</tool_call>\n", "Let me see.", [("weather", ARGUMENTS)]),
        (
            f'<tool_call>{WEATHER}</tool_call>\n<tool_call>{{"name": "now", "arguments": {{}}}}</tool_call>',
            "",
            [("weather", ARGUMENTS), ("now", "{}")],
        ),
        ('<tool_call>{"name": "now"}</tool_call> Done.', " Done.", [("now", "{}")]),
        ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [("f", '{"x": 1}')]),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("f", '{"x": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {"x": "}<\\""}}', "", [("f", '{"x": "}<\\""}')]),
        ('<tool_call>{"name": "f", "arguments": {"x": 1', "", [("f", '{"x": 1')]),
        ("a <tool_call>no JSON</tool_call>", "a <tool_call>no JSON</tool_call>", []),
        ('a <tool_call> {"na', 'a <tool_call> {"na', []),
        ("a < b, <tool_", "a < b, <tool_", []),
    ],
)  # fmt: skip
def test_hermes(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    delta = whole(HERMES(), list(text))
    assert delta.content == content
    assert [(call.name, call.arguments) for call in delta.calls] == calls
    assert [call.index for call in delta.calls] == list(range(len(calls)))


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "f", "parameters": {"x": 1}}', "", [("f", '{"x": 1}')]),
        ('<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
        (
            '\n{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": null}}',
            "",
            [("f", "{}"), ("g", '{"a": null}')],
        ),
        (
            '[{"name": "f", "parameters": {}}, {"name": "g", "parameters": {}}]',
            "",
            [("f", "{}"), ("g", "{}")],
        ),
        ("[1, 2]", "[1, 2]", []),
        ('{"name": "Ada", "born": 1815}', '{"name": "Ada", "born": 1815}', []),
        ("{not JSON}", "{not JSON}", []),
        ('Use {"name": "f", "parameters": {}}', 'Use {"name": "f", "parameters": {}}', []),
        ('{"name": "f", "parameters": {}} and so on', "and so on", [("f", "{}")]),
    ],
)
def test_json_calls(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    delta = whole(LLAMA3(), list(text))
    assert delta.content.strip() == content
    assert [(call.name, call.arguments) for call in delta.calls] == calls


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"),
    [
        ("", "<think>\nhm\n</think>\n\nYes.", "\nhm\n", "\n\nYes."),
        ("<think>\n", "hm</think>Yes.", "hm", "Yes."),
        ("<think>\n\n</think>\n\n", "Yes.", "", "Yes."),
        ("", "Yes. <think>no</think>", "", "Yes. <think>no</think>"),
        ("", "<think>cut off </thi", "cut off </thi", ""),
        ("", " <thi", "", " <thi"),
        ("<think>\n", "<think>\nhm</think>Yes.", "\nhm", "Yes."),
        ("<think>", " <thi", " <thi", ""),
        ("<think>\n\n</think>\n\n", "\n</think>\n\nYes.", "", "\n\nYes."),
    ],
)
def test_think(prompt: str, text: str, reasoning: str, content: str) -> None:
    for pieces in (list(text), [text]):
        assert whole(ReasoningParser(prompt), pieces) == Delta(content=content, reasoning=reasoning)


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"),
    [
        ("", "<|channel>thought\nhm<channel|>Yes.", "hm", "Yes."),
        ("", "<|channel>thousands<channel|>Yes.", "thousands", "Yes."),
        ("", "<|channel>thou", "thou", ""),
        ("<|channel>thought\n", "hm<|tool_call>", "hm", "<|tool_call>"),
        ("<|channel>", "thought\nhm", "hm", ""),
        ("<|channel>thought\n<channel|>", "Yes.", "", "Yes."),
    ],
)
def test_the_label_of_a_channel_is_no_reasoning(prompt: str, text: str, reasoning: str, content: str) -> None:
    for pieces in (list(text), [text]):
        delta = whole(ReasoningParser(prompt, REASONING_FORMATS["gemma4"]), pieces)
        assert delta == Delta(content=content, reasoning=reasoning)


@pytest.mark.parametrize(
    ("parser", "text", "content"),
    [
        (HERMES, "I look.\n<tool_call>", "I look."),
        (HERMES, '<tool_call>{"name": "f", "argu', ""),
        (HERMES, "I look.\n<tool_c", "I look."),
        (HERMES, f'<tool_call>{WEATHER}</tool_call>\n<tool_call>{{"na', ""),
        (HERMES, "if a <", "if a <"),
        (LLAMA3, '{"name": "f", "par', ""),
        (LLAMA3, '<|python_tag|>{"na', ""),
        (LLAMA3, "<|python", ""),
        (LLAMA3, '{"name": "f", "parameters": {}}; {"na', ""),
        (LLAMA3, '{"title": "The na', '{"title": "The na'),
    ],
)
def test_a_call_that_max_tokens_cuts_before_its_arguments_is_no_content(
    parser: Callable[[], CallParser], text: str, content: str
) -> None:
    assert whole(parser(), list(text), cut=True).content == content
    assert whole(parser(), [text], cut=True).content == content
    if "parameters" not in text and WEATHER not in text:
        assert whole(parser(), list(text)).content.strip() == text  # the model ended it itself


def test_arguments_are_streamed_after_the_name() -> None:
    parser = HERMES()
    assert parser.push('<tool_call>{"name": "f", "argu') == Delta()
    assert parser.push('ments": {"a') == Delta(calls=[CallDelta(0, "f", '{"a')])
    assert parser.push('": 1') == Delta(calls=[CallDelta(0, None, '": 1')])
    assert parser.push("}}</tool_call>") == Delta(calls=[CallDelta(0, None, "}")])


def test_a_message_of_reasoning_and_calls() -> None:
    text = f'<think>hm</think>\n\n<tool_call>{WEATHER}</tool_call><tool_call>{{"name": "g"}}</tool_call>'
    format = MessageFormat(partial(ReasoningParser, ""), HERMES, one_call=True)
    parser = MessageParser(format, new_id=lambda: "call_1")
    message = message_fields(parser.push(text, last=True))
    assert parser.called
    assert without_nulls(message) == {
        "reasoning": "hm",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
        ],
    }
    assert message["content"] is None
    assert json.loads(message["tool_calls"][0]["function"]["arguments"])["days"] == [1, 2]
    hidden = MessageParser(MessageFormat(partial(ReasoningParser, ""), show_reasoning=False))
    delta = hidden.push(text, last=True)
    assert (delta.reasoning, delta.calls) == ("", [])


@pytest.mark.parametrize(
    "text",
    ["", "[", '[{"na', '[{"name": "f", "parameters": ', '[{"name": "f", "parameters": {}}, {"na'],
)
def test_a_required_call_that_is_cut_is_no_content(text: str) -> None:
    tools = [Tool(function=Function(name="f"))]
    choice = parse_tool_choice(
        tools, "required", one_call=False, constrained=False, known_format=False, whitespace="compact"
    )
    parser = MessageParser(MessageFormat(tools=choice.parser))
    delta = Delta()
    for character in text:
        delta.add(parser.push(character, last=False))
    delta.add(parser.push("", last=True, cut=True))
    assert delta.content == ""
    assert [call.name for call in delta.calls] == (["f"] if '"parameters": {}' in text else [])


def test_a_call_of_a_named_function_is_not_the_models_choice() -> None:
    parser = MessageParser(MessageFormat(tools=partial(NamedCallParser, "f"), named=True))
    assert parser.push("", last=False) == Delta()
    assert parser.push('{"x": ', last=False).calls[0].name == "f"
    assert parser.push("1}", last=True).calls == [CallDelta(0, None, "1}")]
    assert not parser.called


def test_fields_of_events() -> None:
    first = Delta(calls=[CallDelta(0, "f", "", "call_1")])
    assert delta_fields(first) == {
        "tool_calls": [
            {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}
        ]
    }
    assert delta_fields(Delta(calls=[CallDelta(1, None, "{")])) == {
        "tool_calls": [{"index": 1, "function": {"arguments": "{"}}]
    }
    assert delta_fields(Delta(content="a", reasoning="b")) == {"reasoning": "b", "content": "a"}
    assert delta_fields(Delta()) == {}
