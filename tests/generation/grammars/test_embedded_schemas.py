from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.generation.grammars.embedded_schemas import rewritten_grammar
from tests.generation.grammars.admission import grammar_admits

INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}


def test_schemas_in_lark_are_rewritten() -> None:
    lark = f'start: "%json {{" %json {json.dumps(INT64)} /%json \\{{/ // %json {{'
    rewritten = rewritten_grammar(lark)
    assert grammar_admits(rewritten, f"%json {{{2**63 - 1}%json {{")
    assert not grammar_admits(rewritten, f"%json {{{2**63}%json {{")


def test_schemas_of_a_list_of_grammars_are_rewritten() -> None:
    parts: list[dict[str, Any]] = [
        {"name": "a", "lark_grammar": "start: @b"},
        {"name": "b", "lark_grammar": f"start: %json {json.dumps(INT64)} @c"},
        {"name": "c", "json_schema": INT64},
    ]
    rewritten = rewritten_grammar(json.dumps({"grammars": parts}))
    assert grammar_admits(rewritten, str(2**63 - 1) + "-5")


def test_schemas_of_tools_are_closed_and_others_are_not() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null"}}}
    own = rewritten_grammar(f"start: %json {json.dumps(schema)}")
    tools = rewritten_grammar(f"start: %json {json.dumps({**schema, 'x-guidance': {'lenient': True}})}")
    assert grammar_admits(own, '{"b":1}')
    assert not grammar_admits(tools, '{"b":1}')


@pytest.mark.parametrize("lenient", [True, False])
def test_what_cannot_be_enforced_is_refused_unless_the_tool_is_not_strict(lenient: bool) -> None:
    schema = {"properties": {"id": {"const": 2**53 + 1}}, "x-guidance": {"lenient": lenient}}
    lark = f"start: %json {json.dumps(schema)}"
    if lenient:
        assert grammar_admits(rewritten_grammar(lark), '{"id":5}')
    else:
        with pytest.raises(ValueError, match=r"properties\.id: the number 9007199254740993"):
            rewritten_grammar(lark)


def test_a_grammar_without_schemas_stays() -> None:
    assert rewritten_grammar('start: "a"') == 'start: "a"'
