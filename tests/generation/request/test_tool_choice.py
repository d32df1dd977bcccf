"""Which choices of tools are served, and what the others are told."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from penstock.config.serve import ServeConfig
from penstock.generation.parsers.message import MessageParser
from penstock.generation.plan import RequestPlan
from penstock.generation.prompt.chat_template import ChatTemplate
from tests.generation.planning import chat_body, error_of, planners, refusal_of, tiny_tokenizer

PARAMETERS = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/Place"}},
    "required": ["place"],
    "$defs": {"Place": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
BARE = {"type": "function", "function": {"name": "g"}}
PLAIN = planners()
HERMES = planners(template=ChatTemplate({"default": "x", "tool_use": "<tool_call>"}, {}))


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOL], "tool_choice": "none"},
        {"tool_choice": "none"},
        {"tools": []},
        {"tools": [], "tool_choice": "auto"},
    ],
)
def test_text_answers_are_served_with_tools_or_without(fields: dict[str, Any]) -> None:
    assert PLAIN.chat(chat_body(**fields)).format is None
    assert HERMES.chat(chat_body(**fields)).format is None


def test_a_model_that_may_not_call_does_not_see_the_tools() -> None:
    names = ChatTemplate(
        {"default": "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}."}, {}
    )
    shows = planners(template=names)
    assert shows.chat(chat_body(tools=[TOOL], tool_choice="required")).prompts == ["f."]
    assert shows.chat(chat_body(tools=[TOOL], tool_choice="none")).prompts == ["."]


@pytest.mark.parametrize("fields", [{}, {"tool_choice": "auto"}, {"parallel_tool_calls": False}])
def test_calls_are_read_where_their_format_is_known(fields: dict[str, Any]) -> None:
    plan = HERMES.chat(chat_body(tools=[TOOL], **fields))
    assert plan.format is not None
    assert plan.format.one_call is ("parallel_tool_calls" in fields)
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert [each.name for each in MessageParser(plan.format).push(call, last=True).calls] == ["f"]
    assert plan.constraint is None
    named = planners(ServeConfig(tool_call_parser="llama3_json"))
    assert named.chat(chat_body(tools=[TOOL], **fields)).format is not None
    assert plan.warning is None


@pytest.mark.parametrize("choice", [None, "auto", {"type": "allowed_tools"}])
def test_a_model_without_a_format_answers_in_text_with_a_warning(choice: Any) -> None:
    if isinstance(choice, dict):
        choice = allowed_tools("auto", "f")
    plan = PLAIN.chat(chat_body(tools=[TOOL], tool_choice=choice))
    assert (plan.format, plan.constraint) == (None, None)
    assert plan.warning is not None
    assert "no format of tool calls" in plan.warning
    assert '"' not in plan.warning
    assert PLAIN.chat(chat_body(tools=[TOOL], tool_choice="none")).warning is None
    assert PLAIN.chat(chat_body(tools=[TOOL], tool_choice="required")).warning is None
    assert HERMES.chat(chat_body(tools=[TOOL], tool_choice=choice)).warning is None


def grammar_accepts(plan: RequestPlan, text: str) -> bool:
    """Whether the grammar of a plan is valid and admits ``text`` as a whole."""
    assert plan.constraint is not None
    grammar = plan.constraint.whole
    assert plan.base.grammar == grammar
    assert not LLMatcher.validate_grammar(grammar)
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, grammar)
    return matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting()


def test_a_named_function_gets_its_arguments() -> None:
    plan = PLAIN.chat(chat_body(tools=[BARE, TOOL], tool_choice={"function": {"name": "f"}}))
    assert grammar_accepts(plan, '{"place": {"city": "Bern"}}')
    assert not grammar_accepts(plan, '{"place": "Bern"}')
    assert plan.format is not None
    assert plan.format.named
    bare = PLAIN.chat(chat_body(tools=[BARE, TOOL], tool_choice={"function": {"name": "g"}}))
    assert grammar_accepts(bare, '{"any": 1}')


@pytest.mark.parametrize(
    "origin",
    [{"$id": "https://x.org/f.json"}, {"$schema": "http://json-schema.org/draft-07/schema#"}],
    ids=lambda origin: next(iter(origin)),
)
def test_references_of_parameters_hold_in_the_list_of_calls(origin: dict[str, str]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": origin | PARAMETERS}}
    plan = PLAIN.chat(chat_body(tools=[BARE, tool], tool_choice="required"))
    assert grammar_accepts(plan, '[{"name": "f", "parameters": {"place": {"city": "Bern"}}}]')


def test_required_calls_are_a_list_of_any_of_the_tools() -> None:
    plan = PLAIN.chat(chat_body(tools=[BARE, TOOL], tool_choice="required"))
    call = '{"name": "f", "parameters": {"place": {"city": "Bern"}}}'
    assert grammar_accepts(plan, f"[{call}]")
    assert grammar_accepts(plan, f'[{call}, {{"name": "g", "parameters": {{}}}}]')
    assert not grammar_accepts(plan, "[]")
    assert not grammar_accepts(plan, call.replace('{"city": "Bern"}', "1"))
    one = PLAIN.chat(chat_body(tools=[TOOL], tool_choice="required", parallel_tool_calls=False))
    assert grammar_accepts(one, f"[{call}]")
    assert not grammar_accepts(one, f"[{call}, {call}]")


def allowed_tools(mode: str, *names: str) -> dict[str, Any]:
    listed = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": listed}}


def test_allowed_tools_are_the_only_ones() -> None:
    names = ChatTemplate(
        {"default": "{% for tool in tools %}{{ tool.function.name }} <tool_call>{% endfor %}"}, {}
    )
    shows = planners(template=names)
    auto = shows.chat(chat_body(tools=[BARE, TOOL], tool_choice=allowed_tools("auto", "f")))
    assert auto.prompts == ["f <tool_call>"]
    assert auto.constraint is None
    assert auto.format is not None
    plan = shows.chat(chat_body(tools=[BARE, TOOL], tool_choice=allowed_tools("required", "f", "f")))
    assert plan.prompts == ["f <tool_call>"]
    assert grammar_accepts(plan, '[{"name": "f", "parameters": {"place": {"city": "Bern"}}}]')
    assert not grammar_accepts(plan, '[{"name": "g", "parameters": {}}]')


@pytest.mark.parametrize("depth", [300, 600, 900])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_parameters_nested_too_deeply_are_refused(depth: int, choice: Any) -> None:
    parameters: dict[str, Any] = {}
    for _ in range(depth):
        parameters = {"items": parameters}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    error = refusal_of(PLAIN.chat, chat_body(tools=[tool], tool_choice=choice))
    assert error.status == 400
    assert str(error.param).startswith("tools")


REQUIRED = '[{"name": "f", "parameters": {"place": {"city": "Bern"}}}]'


@pytest.mark.parametrize(
    ("prompt", "text", "good"),
    [
        ("</think>x", f"<think>hm</think>\n\n{REQUIRED}", True),
        ("</think>x", REQUIRED, True),
        ("</think>x", f"hm</think>{REQUIRED}", False),
        ("</think><think>\n", f"hm</think>\n\n{REQUIRED}", True),
        ("</think><think>\n", REQUIRED, False),
        ("<think>\n\n</think>\n\n", REQUIRED, True),
        ("<think>\n\n</think>\n\n", f"<think>hm</think>{REQUIRED}", False),
    ],
)
def test_reasoning_may_precede_an_output_under_a_constraint(prompt: str, text: str, good: bool) -> None:
    thinking = planners(template=ChatTemplate({"default": prompt}, {}))
    plan = thinking.chat(chat_body(tools=[TOOL], tool_choice="required"))
    assert plan.constraint is not None
    assert plan.constraint.field == "tools"
    assert grammar_accepts(plan, text) is good
    if good:
        assert plan.format is not None
        delta = MessageParser(plan.format).push(text, last=True)
        assert [call.name for call in delta.calls] == ["f"]
        assert delta.reasoning.strip() == ("hm" if "hm" in text else "")
    named = thinking.chat(
        chat_body(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}})
    )
    arguments = '{"place": {"city": "Bern"}}'
    text = text.replace(REQUIRED, arguments)
    assert grammar_accepts(named, text) is good
    if good:
        assert named.format is not None
        [call] = MessageParser(named.format).push(text, last=True).calls
        assert call.arguments == arguments
    formatted = thinking.chat(chat_body(response_format={"type": "json_object"}))
    assert grammar_accepts(formatted, text) is good


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"tools": [TOOL, BARE], "tool_choice": {"type": "function", "function": {"name": "zz"}}},
            "tool_choice",
            f"'zz', does not match any of the specified `tools`: {TOOL['function']['name']!r}, ",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}},
            "tool_choice",
            "tool_choice.function.name is missing",
        ),
        ({"tools": [TOOL], "tool_choice": "all"}, "tool_choice", "got 'all'"),
        ({"tool_choice": "auto"}, "tool_choice", "`tools` must be set"),
        ({"tools": [TOOL], "tool_choice": {"type": "search"}}, "tool_choice", "allowed_tools, got 'search'"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}},
            "tool_choice",
            "a mode, auto or required",
        ),
        (
            {"tools": [TOOL], "tool_choice": allowed_tools("none", "f")},
            "tool_choice",
            "a mode, auto or required",
        ),
        ({"tools": [TOOL], "tool_choice": allowed_tools("auto")}, "tool_choice", "at least one function"),
        (
            {"tools": [TOOL], "tool_choice": allowed_tools("auto", "f", "h")},
            "tool_choice",
            "allowed_tools.tools[1] does not match any",
        ),
        (
            {"tools": [TOOL], "tool_choice": "required", "structured_outputs": {"choice": ["a"]}},
            "structured_outputs",
            "Only one constraint",
        ),
        ({"tools": [TOOL, TOOL | {"type": "search"}]}, "tools[1].type", "must be function"),
    ],
)
def test_other_choices_are_refused(fields: dict[str, Any], param: str, message: str) -> None:
    error = error_of(HERMES.chat, chat_body(**fields))
    assert (error.status, error.param) == (400, param)
    assert message in error.message


def test_special_tokens_stay_where_a_parser_looks_for_them() -> None:
    marks_start = ChatTemplate({"default": "<tool_call><|im_start|>"}, {})
    assert planners(template=marks_start).chat(chat_body(tools=[TOOL])).skip_special_tokens
    assert tiny_tokenizer().has_special(("x", "<|im_start|>"))
    assert not tiny_tokenizer().has_special(("<tool_call>",))
