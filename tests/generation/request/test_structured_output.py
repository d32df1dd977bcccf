"""Requests to grammars: one constraint, named where it is wrong, validated without a tokenizer."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from penstock.config.serve import ServeConfig
from penstock.generation.grammars import checker as checker_module
from penstock.generation.grammars.checker import GrammarChecker
from penstock.generation.request.structured_output import Constraint
from penstock.http.errors import ApiError
from penstock.supervisor.startup.model_resolution import DEMO_DIR
from tests.generation.planning import body, chat_body, error_of, planners, refusal_of

PLANNER = planners()
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


def planned(**fields: Any) -> Constraint:
    """The constraint of a completion; a chat has the same."""
    plan = PLANNER.completion(body(**fields))
    chat = PLANNER.chat(chat_body(**fields))
    assert plan.constraint is not None
    assert plan.constraint == chat.constraint
    assert plan.base.grammar == chat.base.grammar == plan.constraint.grammar
    return plan.constraint


def check(*constraints: Constraint) -> Constraint:
    """The last of ``constraints``, checked like all others before it."""
    checker = GrammarChecker()

    async def check_all() -> Constraint:
        return [await checker.check_grammar(constraint) for constraint in constraints][-1]

    try:
        return asyncio.run(check_all())
    finally:
        checker.close()


def matches(constraint: Constraint, text: str, tokenizer: LLTokenizer) -> bool:
    """Whether ``text`` is a whole output of the grammar."""
    matcher = LLMatcher(tokenizer, constraint.grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting()


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer((DEMO_DIR / "tokenizer.json").read_text())


OUTPUTS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {"json": SCHEMA},
        ['{"a": 1}', '{"a":1}'],
        ["{}", '{"a": 1.5}', '{"a":  1}', '{"a":\n1}', '{ "a":1}'],
    ),
    ({"json": json.dumps(SCHEMA)}, ['{"a": 1}'], ["{}"]),
    ({"json": SCHEMA, "disable_any_whitespace": True}, ['{"a":1}'], ['{"a": 1}']),
    ({"json": SCHEMA, "whitespace_pattern": " ?"}, ['{"a": 1}'], ['{"a":\n1}']),
    ({"json": SCHEMA | {"title": "T"}}, ['{"a": 1}'], ['{"a": 1, "b": 2}']),
    ({"json": SCHEMA | {"additionalProperties": True}}, ['{"a": 1, "b": 2}'], ['{"b": 2}']),
    ({"json": SCHEMA, "disable_additional_properties": True}, ['{"a": 1}'], ['{"a": 1, "b": 2}']),
    ({"json": SCHEMA, "disable_any_whitespace": False}, ['{"a": 1}'], ['{"a":\n1}']),
    ({"json_object": True}, ["{}", '{"x": [1, null]}'], ["[]", "1", '{"x":  1}']),
    ({"regex": r"\d{2}[a-f]"}, ["12a"], ["12", "1ab"]),
    ({"choice": ["yes", 'n"o', "é\n"]}, ["yes", 'n"o', "é\n"], ["y", "no"]),
    ({"grammar": 'start: "a" b+\nb: "x" | "y"'}, ["axy"], ["a", "b"]),
    ({"grammar": 'root ::= "a" b+\nb ::= "x" | "y"'}, ["axy"], ["a", "b"]),
]


@pytest.mark.parametrize(("outputs", "good", "bad"), OUTPUTS, ids=lambda value: str(value)[:40])
def test_outputs_of_each_kind(
    outputs: dict[str, Any], good: list[str], bad: list[str], tokenizer: LLTokenizer
) -> None:
    constraint = planned(structured_outputs=outputs)
    assert constraint.field == f"structured_outputs.{next(iter(outputs))}"
    checked = check(constraint)
    assert [matches(checked, text, tokenizer) for text in good + bad] == [True] * len(good) + [False] * len(
        bad
    )


def test_the_server_may_allow_more_whitespace(tokenizer: LLTokenizer) -> None:
    flexible = planners(ServeConfig(json_whitespace="flexible"))
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    texts = ['{"a": 1}', '{ "a" :\n1}', '{"a":' + " " * 65 + "1}"]
    for fields in (
        {"response_format": FORMAT},
        {"structured_outputs": {"json": SCHEMA}},
        {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    ):
        loose, tight = flexible.chat(chat_body(**fields)), PLANNER.chat(chat_body(**fields))
        assert loose.constraint is not None
        assert tight.constraint is not None
        assert [matches(loose.constraint, text, tokenizer) for text in texts] == [True, True, False]
        assert [matches(tight.constraint, text, tokenizer) for text in texts] == [True, False, False]
    request = {"json": SCHEMA, "disable_any_whitespace": True}
    none = flexible.completion(body(structured_outputs=request)).constraint
    assert none is not None
    assert not matches(none, '{"a": 1}', tokenizer)


def test_response_formats(tokenizer: LLTokenizer) -> None:
    assert matches(planned(response_format={"type": "json_object"}), '{"q": 1}', tokenizer)
    schema = planned(response_format=FORMAT)
    assert schema.field == "response_format.json_schema.schema"
    assert matches(schema, '{"a": 1}', tokenizer)
    assert not matches(schema, "{}", tokenizer)
    assert PLANNER.completion(body(response_format={"type": "text"})).constraint is None


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema, got 'xml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs the field 'json_schema'"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format",
            "needs",
        ),
        ({"response_format": {}}, "body.response_format.type", "'type' is missing"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not JSON"),
        ({"structured_outputs": {"json": "[1]"}}, "structured_outputs.json", "must be an object"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "not be empty"),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            "structured_outputs.structural_tag",
            "use grammar",
        ),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs.regx", "did you mean 'regex'?"),
        ({"structured_outputs": {}}, "structured_outputs", "constrains nothing: give it one of json"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs.regex and structured_outputs.choice",
            "Only one constraint",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "response_format and structured_outputs.regex",
            "Only one constraint",
        ),
    ],
)
def test_what_is_no_constraint_is_refused_by_name(fields: dict[str, Any], param: str, reason: str) -> None:
    error = error_of(PLANNER.completion, body(**fields))
    assert (error.status, error.param) == (400, param)
    assert reason in error.message


@pytest.mark.parametrize(
    ("outputs", "field", "reason"),
    [
        ({"regex": "[a-z"}, "structured_outputs.regex", "unclosed character class"),
        ({"regex": "(?=a)b"}, "structured_outputs.regex", "look-around"),
        ({"grammar": "start: nowhere"}, "structured_outputs.grammar", "nowhere"),
        ({"grammar": 'root ::= "a'}, "structured_outputs.grammar", "end of input"),
        ({"json": {"type": "foo"}}, "structured_outputs.json", "Invalid type: foo"),
        ({"json": {"not": {}}}, "structured_outputs.json", "the keyword 'not' cannot be enforced"),
        ({"json": {"$ref": "#/$defs/x"}}, "structured_outputs.json", "does not exist"),
        ({"json_object": True, "whitespace_pattern": "[ "}, "structured_outputs.json_object", "unclosed"),
    ],
)
def test_bad_grammars_are_refused_with_the_reason(outputs: dict[str, Any], field: str, reason: str) -> None:
    with pytest.raises(ApiError) as refused:
        check(planned(structured_outputs=outputs))
    assert refused.value.status == 400
    assert refused.value.param == field
    assert refused.value.message.startswith(f"{field} is not valid: ")
    assert reason in refused.value.message


def test_valid_grammars_are_remembered_up_to_a_limit_and_by_their_digests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checker_module, "KNOWN_GRAMMARS", 10)
    checker = GrammarChecker()

    async def check_all() -> None:
        for number in range(20):
            await checker.check_grammar(Constraint("f", LLMatcher.grammar_from_regex(f"a{number}")))

    asyncio.run(check_all())
    checker.close()
    assert len(checker._valid) == 10
    assert all(len(digest) == 16 for digest in checker._valid)


def test_no_model_library_is_loaded() -> None:
    module = "penstock.generation.request.structured_output"
    code = f"import {module}, sys; print(*{{'torch', 'transformers'}} & sys.modules.keys())"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == ""


@pytest.mark.parametrize("depth", [300, 900])
@pytest.mark.parametrize("closed", [False, True])
def test_schemas_nested_too_deeply_are_refused(depth: int, closed: bool) -> None:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    wanted = {"json": schema, "disable_additional_properties": closed}
    error = refusal_of(PLANNER.completion, body(structured_outputs=wanted))
    assert error.status == 400
    assert str(error.param).startswith("structured_outputs.json")
