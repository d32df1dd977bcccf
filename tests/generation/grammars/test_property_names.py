"""How many properties an object has, and which names."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest
from pydantic import BaseModel

from penstock.generation.grammars.property_names import MAX_OPTIONAL
from tests.generation.grammars.admission import admits, checked

INTEGER = {"type": "integer"}
OPEN = {"patternProperties": {"^[ab]$": INTEGER}, "additionalProperties": False}
NAMED = {"properties": dict.fromkeys("abc", INTEGER), "additionalProperties": False}


class Level(Enum):
    LOW = "low"
    HIGH = "high"


class Report(BaseModel):
    counts: dict[Level, int]


def test_names_of_an_enumeration() -> None:
    schema = Report.model_json_schema()
    assert schema["properties"]["counts"]["propertyNames"] == {"$ref": "#/$defs/Level"}
    assert admits(schema, '{"counts": {"low": 1}}')
    assert not admits(schema, '{"counts": {"middle": 1}}')
    assert not admits(schema, '{"counts": {"low": "x"}}')


@pytest.mark.parametrize("names", [{"pattern": "^[ab]$"}, {"type": "string", "maxLength": 1}, {}], ids=str)
def test_names_by_reference(names: dict[str, Any]) -> None:
    schema = {
        "type": "object",
        "propertyNames": {"$ref": "#/$defs/outer"},
        "additionalProperties": INTEGER,
        "$defs": {"inner": names, "outer": {"$ref": "#/$defs/inner"}},
    }
    assert admits(schema, '{"a": 1}')
    assert not admits(schema, '{"a": "x"}')
    assert admits(schema, '{"cc": 1}') == (names == {})


@pytest.mark.parametrize(
    "schema",
    [
        OPEN | {"minProperties": 2, "maxProperties": 2},
        OPEN | {"minProperties": 3, "required": ["a"]},
        OPEN | {"minProperties": 3, "required": ["a", "a"]},
        {"propertyNames": {"pattern": "^[ab]$"}, "additionalProperties": INTEGER, "minProperties": 2},
        {"propertyNames": {"maxLength": 1}, "minProperties": 2},
        {"additionalProperties": INTEGER, "minProperties": 2},
        {"properties": dict.fromkeys("abcdefghijklmnop", INTEGER), "minProperties": 8},
        {"properties": {name: {"anyOf": [INTEGER] * 40} for name in "abcdefghijklmnop"}, "minProperties": 1},
    ],
    ids=str,
)
def test_a_count_of_names_that_cannot_be_enforced_is_refused(schema: dict[str, Any]) -> None:
    whole = {"type": "object", "properties": {"x": {"type": "object"} | schema}}
    _, verdict = checked(whole)
    assert verdict.path == ("properties", "x")
    assert verdict.problem.endswith("the keyword 'minProperties' cannot be enforced")
    assert admits(whole, '{"x": {"a": 1}}', strict=False)


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        (OPEN | {"minProperties": 2, "required": ["a"]}, ["ab"], ["a", "aa"]),
        (NAMED | {"minProperties": 1}, ["a", "b", "c", "ac", "abc"], [""]),
        (NAMED | {"minProperties": 2}, ["ab", "ac", "bc", "abc"], ["", "a", "c"]),
        (NAMED | {"minProperties": 3}, ["abc"], ["ab", "c"]),
        (NAMED | {"minProperties": 2, "required": ["b"]}, ["ab", "bc", "abc"], ["b", "ac"]),
        ({"propertyNames": {"enum": ["a", "b"]}, "minProperties": 2}, ["ab"], ["a", "b", ""]),
        ({"properties": {"a": INTEGER, "b": False, "c": INTEGER}, "minProperties": 2}, ["ac"], ["ab", "a"]),
    ],
    ids=str,
)
def test_a_count_of_names_that_are_known(
    schema: dict[str, Any], inside: list[str], outside: list[str]
) -> None:
    def text(names: str) -> str:
        return "{" + ", ".join(f'"{name}": 1' for name in names) + "}"

    schema = {"type": "object"} | schema
    assert [each for each in inside if not admits(schema, text(each))] == []
    assert [each for each in outside if admits(schema, text(each))] == []


@pytest.mark.parametrize("strict", [True, False])
def test_more_optional_properties_than_a_grammar_can_have(strict: bool) -> None:
    names = [f"p{number}" for number in range(MAX_OPTIONAL + 1)]
    schema = {"type": "object", "properties": dict.fromkeys(names, INTEGER)}
    _, verdict = checked({"items": schema}, strict=strict)
    assert verdict.path == ("items",)
    assert verdict.problem.startswith(f"the keyword 'properties' is too large: at most {MAX_OPTIONAL} ")
    assert admits(schema | {"required": names[-2:-1]}, f'{{"{names[-2]}": 1}}')


def test_more_properties_than_there_are() -> None:
    _, verdict = checked({"type": "object"} | NAMED | {"minProperties": 4})
    assert verdict.problem.startswith("Unsatisfiable")
