"""Custom tools in chat completions: what the model sees and may write, and what the client gets and sends."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from penstock.generation.parsers.message import MessageParser
from penstock.generation.plan import RequestPlan
from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.wire.frames import FinishReason
from tests.generation.delivery import collected_reply, streamed_events
from tests.generation.grammars.test_lark_in_json import GOOD, PATCH
from tests.generation.parsers.test_replies import encode
from tests.generation.planning import chat_body, error_of, planners

TEMPLATE = """{% for tool in tools or [] %}{{ tool.function | tojson }}{% endfor %}<tool_call>
{%- for m in messages %}[{{ m.role }}]{{ m.content }}
{%- for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}{% endfor %}"""
HERMES = planners(template=ChatTemplate({"default": TEMPLATE}, {}))
PLAIN = planners()


def custom(name: str, syntax: str = "", definition: str = "") -> dict[str, Any]:
    tool: dict[str, Any] = {"name": name, "description": f"About {name}."}
    if syntax:
        tool["format"] = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": tool}


PATCH_TOOL = custom("patch", "lark", PATCH)
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def call_text(text: str) -> str:
    return f"<tool_call>\n{written({'name': 'patch', 'arguments': {'input': text}})}\n</tool_call>"


@cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def accepts(plan: RequestPlan, text: str) -> bool:
    assert plan.constraint is not None
    assert plan.base.grammar == plan.constraint.grammar
    assert not LLMatcher.validate_grammar(plan.constraint.grammar)
    matcher = LLMatcher(tokenizer(), plan.constraint.grammar)
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_the_model_sees_a_function() -> None:
    plan = HERMES.chat(chat_body(tools=[PATCH_TOOL, FUNCTION]))
    assert isinstance(plan.prompts[0], str)
    function = json.JSONDecoder().raw_decode(plan.prompts[0])[0]
    assert function["name"] == "patch"
    assert function["description"] == "About patch."
    assert list(function["parameters"]["properties"]) == ["input"]
    assert "*** Start" in function["parameters"]["properties"]["input"]["description"]


def test_a_history_with_custom_calls() -> None:
    call = {"id": "1", "type": "custom", "custom": {"name": "patch", "input": "a\n"}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]
    plan = HERMES.chat(chat_body(messages=messages, tools=[PATCH_TOOL]))
    assert isinstance(plan.prompts[0], str)
    assert '"function": {"name": "patch", "arguments": {"input": "a\\n"}}' in plan.prompts[0]
    assert plan.prompts[0].endswith("[tool]done")
    broken = [{"role": "assistant", "tool_calls": [{"id": "1"}]}]
    error = error_of(HERMES.chat, chat_body(messages=broken))
    assert error.param == "messages[0].tool_calls[0].function"


def test_the_grammar_holds_once_the_model_calls() -> None:
    plan = HERMES.chat(chat_body(tools=[PATCH_TOOL, FUNCTION, custom("note")]))
    assert accepts(plan, "Hello {}")
    assert accepts(plan, f"I will.\n{call_text(GOOD)}")
    assert not accepts(plan, call_text(GOOD + "x"))
    free = HERMES.chat(chat_body(tools=[custom("note"), FUNCTION]))
    assert free.constraint is None, "a text needs no grammar"
    strict = {
        "name": "g",
        "strict": True,
        "parameters": {"type": "object", "properties": {"x": {"type": "null"}}},
    }
    plan = HERMES.chat(chat_body(tools=[{"type": "function", "function": strict}]))
    assert accepts(plan, 'a <tool_call>{"name": "g", "arguments": {"x": null}}</tool_call> b')
    assert not accepts(plan, '<tool_call>{"name": "g", "arguments": {"x": 1}}</tool_call>')
    formatted = HERMES.chat(
        chat_body(tools=[{"type": "function", "function": strict}], response_format={"type": "json_object"})
    )
    assert formatted.constraint is not None
    assert formatted.constraint.field == "response_format"


@pytest.mark.parametrize("plans", [HERMES, PLAIN], ids=["known", "unknown"])
def test_forced_calls_match_the_grammar(plans: Any) -> None:
    named = {"type": "custom", "custom": {"name": "patch"}}
    plan = plans.chat(chat_body(tools=[FUNCTION, PATCH_TOOL], tool_choice=named))
    assert accepts(plan, written({"input": GOOD}))
    assert not accepts(plan, json.dumps({"input": "x"}))
    plan = plans.chat(chat_body(tools=[FUNCTION, PATCH_TOOL], tool_choice="required"))
    assert accepts(plan, written([{"name": "patch", "parameters": {"input": GOOD}}]))
    assert accepts(plan, json.dumps([{"name": "f", "parameters": {"x": [1]}}]))
    assert not accepts(plan, json.dumps([{"name": "patch", "parameters": {"input": "x"}}]))
    allowed = {"mode": "required", "tools": [named]}
    plan = plans.chat(
        chat_body(
            tools=[FUNCTION, PATCH_TOOL], tool_choice={"type": "allowed_tools", "allowed_tools": allowed}
        )
    )
    assert not accepts(plan, json.dumps([{"name": "f", "parameters": {}}]))


@pytest.mark.parametrize("width", [1, 3, 1000])
def test_replies(width: int) -> None:
    text = 'a\n"é\\" 😀'
    arguments = json.dumps({"input": text})
    output = f'Now <tool_call>{{"name": "patch", "arguments": {arguments}}}</tool_call>'
    output += '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    tokens = encode(output)
    fields: dict[str, Any] = {"tools": [PATCH_TOOL, FUNCTION], "max_tokens": 512}
    whole = collected_reply(HERMES.chat(chat_body(**fields)), tokens, FinishReason.STOP_TOKEN, chat=True)
    [one, two] = whole["choices"][0]["message"]["tool_calls"]
    assert (one["type"], one["custom"]) == ("custom", {"name": "patch", "input": text})
    assert two["function"] == {"name": "f", "arguments": '{"x": 1}'}
    rows = [tokens[start : start + width] for start in range(0, len(tokens), width)]
    *events, _ = streamed_events(
        HERMES.chat(chat_body(stream=True, **fields)), rows, FinishReason.STOP_TOKEN, chat=True
    )
    pieces = [
        call
        for event in events
        for call in event["choices"][0]["delta"].get("tool_calls", ())
        if not call["index"]
    ]
    assert pieces[0]["custom"]["name"] == "patch"
    assert pieces[0]["type"] == "custom"
    assert "".join(piece["custom"]["input"] for piece in pieces) == text
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_arguments_that_are_no_input_are_the_input() -> None:
    plan = HERMES.chat(chat_body(tools=[custom("note")]))
    assert plan.format is not None
    text = '<tool_call>{"name": "note", "arguments": {"text": "a"}}</tool_call> Done.'
    for pieces in ([text], list(text)):
        parser = MessageParser(plan.format, new_id=lambda: "id")
        calls = [call for piece in pieces for call in parser.push(piece, last=False).calls]
        calls += parser.push("", last=True).calls
        assert "".join(call.arguments for call in calls) == '{"text": "a"}'
        assert all(call.custom for call in calls)


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "custom"}, "tools[0].custom"),
        ({"type": "function"}, "tools[0].function"),
        ({"type": "search"}, "tools[0].type"),
        (custom("f", "ebnf", "x"), "tools[0].custom.format.grammar.syntax"),
        (custom("f", "lark", " "), "tools[0].custom.format.grammar.definition"),
        (custom("f", "regex", "a" * 70_000), "tools[0].custom.format.grammar.definition"),
        (custom("f", "lark", 'start: "(" start ")" | "\\n"'), "tools"),
        (
            {"type": "custom", "custom": {"name": "f", "format": {"type": "json"}}},
            "tools[0].custom.format.type",
        ),
    ],
)
def test_bad_tools(tool: dict[str, Any], param: str) -> None:
    error = error_of(HERMES.chat, chat_body(tools=[tool]))
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize("kind", ["function", "custom"])
def test_an_error_shows_how_a_tool_is_written(kind: str) -> None:
    """Clients of the Responses API do not nest the name."""
    error = error_of(HERMES.chat, chat_body(tools=[{"type": kind, "name": "f"}]))
    assert error.message == (
        f'tools[0].{kind} is missing: here a tool is written {{"type": "{kind}", "{kind}": {{"name": …}}}}.'
    )


def test_a_format_without_a_grammar_warns() -> None:
    template = ChatTemplate({"default": "<|python_tag|>"}, {})
    plan = planners(template=template).chat(chat_body(tools=[PATCH_TOOL]))
    assert plan.constraint is None
    assert plan.warning is not None
    assert "no grammar" in plan.warning
