"""Which choices of tools are served, and what the others are told."""

from typing import Any

import pytest

from penstock.api.chat_template import ChatTemplate
from penstock.config.options import ServeConfig

from .planning import chat_body, error_of, planner

TOOL = {"type": "function", "function": {"name": "f"}}
PLAIN = planner()
HERMES = planner(template=ChatTemplate({"default": "x", "tool_use": "<tool_call>"}, {}))


@pytest.mark.parametrize(
    "fields", [{"tools": [TOOL], "tool_choice": "none"}, {"tool_choice": "none"}, {"tools": []}]
)
def test_text_answers_are_served_with_tools_or_without(fields: dict[str, Any]) -> None:
    assert PLAIN.chat(chat_body(**fields)).parser is None
    assert HERMES.chat(chat_body(**fields)).parser is None


@pytest.mark.parametrize("fields", [{}, {"tool_choice": "auto"}, {"parallel_tool_calls": False}])
def test_calls_are_read_where_their_format_is_known(fields: dict[str, Any]) -> None:
    assert HERMES.chat(chat_body(tools=[TOOL], **fields)).parser is not None
    named = planner(ServeConfig(tool_call_parser="llama3_json"))
    assert named.chat(chat_body(tools=[TOOL], **fields)).parser is not None
    error = error_of(PLAIN.chat, chat_body(tools=[TOOL], **fields))
    assert (error.status, error.param) == (400, "tool_choice")
    assert "--tool-call-parser" in error.message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [TOOL], "tool_choice": "required"}, "with tools it must be none or auto"),
        ({"tools": [TOOL], "tool_choice": TOOL}, "with tools it must be none or auto"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "does not match any of the specified"),
        ({"tools": [TOOL], "tool_choice": "all"}, "got 'all'"),
        ({"tool_choice": "auto"}, "`tools` must be set"),
    ],
)
def test_other_choices_are_refused(fields: dict[str, Any], message: str) -> None:
    error = error_of(HERMES.chat, chat_body(**fields))
    assert (error.status, error.param) == (400, "tool_choice")
    assert message in error.message


def test_only_functions_are_tools() -> None:
    error = error_of(HERMES.chat, chat_body(tools=[TOOL, TOOL | {"type": "search"}]))
    assert error.param == "tools[1].type"


def test_special_tokens_stay_where_a_parser_looks_for_them() -> None:
    assert HERMES.chat(chat_body(tools=[TOOL])).skip_special_tokens
