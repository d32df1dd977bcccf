"""Schemas that libraries write and llguidance refuses as they stand."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel, Field

from penstock.generation.grammars.equivalent_schema import simplify
from penstock.generation.grammars.schema_check import check_schema

TOKENIZER = LLTokenizer("byte")


class Leaf(BaseModel):
    kind: Literal["leaf"]


class Branch(BaseModel):
    kind: Literal["branch", "twig"]
    left: Annotated[Leaf | Branch, Field(discriminator="kind")]


def matches(schema: dict[str, Any], text: str) -> bool:
    """Whether the checked grammar of ``schema`` allows ``text`` as a whole."""
    given = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"lenient": True})
    verdict = check_schema(given, ())
    assert verdict.problem == ""
    matcher = LLMatcher(TOKENIZER, verdict.grammar or given, log_level=0)
    return matcher.consume_tokens(TOKENIZER.tokenize_str(text)) and matcher.is_accepting()


def test_a_recursive_union_that_a_property_tells_apart() -> None:
    schema = Branch.model_json_schema()
    assert "discriminator" in json.dumps(schema)
    leaf = {"kind": "leaf"}
    assert matches(schema, json.dumps({"kind": "twig", "left": {"kind": "branch", "left": leaf}}))
    assert not matches(schema, json.dumps({"kind": "twig", "left": {"kind": "branch"}}))
    assert not matches(schema, json.dumps(leaf))


@pytest.mark.parametrize("keyword", ["deprecated", "discriminator", "example", "nullable", "x-order"])
def test_an_annotation_beside_a_recursive_reference(keyword: str) -> None:
    node = {
        "type": "object",
        "properties": {"next": {"$ref": "#/$defs/Node", keyword: True}},
        "additionalProperties": False,
    }
    schema = {"$ref": "#/$defs/Node", "$defs": {"Node": node}}
    assert matches(schema, '{"next": {"next": {}}}')
    assert not matches(schema, '{"next": 1}')


def test_a_property_may_have_the_name_of_an_annotation() -> None:
    schema = {"type": "object", "properties": {"discriminator": {"type": "null", "example": 1}}}
    assert simplify(schema)
    assert schema == {"type": "object", "properties": {"discriminator": {"type": "null"}}}


TAGGED = [
    {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]} for name in ("a", "b")
]


@pytest.mark.parametrize(
    "second",
    [
        TAGGED[0],
        TAGGED[1] | {"required": []},
        TAGGED[1] | {"type": ["object", "null"]},
        TAGGED[1] | {"properties": {"kind": {"enum": ["a", "b"]}}},
        TAGGED[1] | {"properties": {"kind": {"type": "string"}}},
        TAGGED[1] | {"properties": {"kind": {"const": 1}}},
        {"$ref": "#/oneOf/1"},
        {"$ref": "#/nowhere"},
        True,
    ],
    ids=str,
)
def test_alternatives_that_may_hold_at_once_stay(second: Any) -> None:
    schema = {"oneOf": [TAGGED[0], second]}
    assert not simplify(schema)
    assert schema == {"oneOf": [TAGGED[0], second]}


def test_a_choice_beside_another_one_stays() -> None:
    assert not simplify({"oneOf": TAGGED, "anyOf": [True]})


@pytest.mark.parametrize("names", [{"type": "string"}, {}, True], ids=str)
def test_names_that_are_any_text(names: Any) -> None:
    schema = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "boolean"}}
    assert matches(schema, '{"a": true}')
    assert not matches(schema, '{"a": 1}')
