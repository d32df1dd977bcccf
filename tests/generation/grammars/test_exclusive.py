"""``oneOf``: at most one alternative, as the client wrote them, matches what the grammar admits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.generation.grammars.admission import admits, checked

TEXT = {"type": "string"}
INTEGER = {"type": "integer"}


def record(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


PATCH = {
    "type": "array",
    "items": {
        "required": ["op", "path"],
        "allOf": [{"properties": {"path": TEXT}}],
        "oneOf": [
            {"required": ["value"], "properties": {"op": {"enum": ["add", "replace"]}, "value": {}}},
            {"properties": {"op": {"const": "remove"}}},
            {"required": ["from"], "properties": {"op": {"enum": ["move", "copy"]}, "from": TEXT}},
        ],
    },
}
"""As JSON Patch is written: the properties of one object stand in several places, none with a type."""


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"oneOf": [INTEGER, TEXT]}, ["1", '"a"'], ["null"]),
        ({"oneOf": [INTEGER | {"maximum": 3}, INTEGER | {"minimum": 5}]}, ["3", "5"], ["4"]),
        ({"oneOf": [{"enum": ["a", "b"]}, TEXT | {"pattern": "^[0-9]+$"}]}, ['"a"', '"7"'], ['"c"']),
        ({"oneOf": [TEXT | {"maxLength": 2}, TEXT | {"minLength": 3}]}, ['"ab"', '"abc"'], ["1"]),
        (
            {"oneOf": [record("a", a=TEXT), record("b", b=TEXT)]},
            ['{"a": "x"}', '{"b": "x"}'],
            ['{"a": "x", "b": "y"}', "{}"],
        ),
        (
            {"oneOf": [record("k", k={"const": "a"}), record("k", k={"const": "b"}, x=TEXT)]},
            ['{"k": "a"}', '{"k": "b", "x": "y"}'],
            ['{"k": "a", "x": "y"}'],
        ),
        (
            record(a=TEXT, b=TEXT) | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
            ['{"a": "x"}', '{"b": "x"}'],
            ["{}", '{"a": "x", "b": "y"}'],
        ),
        (
            PATCH,
            ['[{"path": "/a", "op": "remove"}]', '[{"path": "/a", "op": "add", "value": 1}]'],
            ['[{"op": "remove"}]', '[{"path": "/a", "op": "add"}]', "[5]"],
        ),
        (
            {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "$defs": {"A": INTEGER, "B": TEXT}},
            ["1", '"a"'],
            ["null"],
        ),
        ({"oneOf": [{"oneOf": [INTEGER, TEXT]}, {"type": "null"}]}, ["1", "null"], ["true"]),
    ],
    ids=str,
)
def test_alternatives_exclude_each_other(schema: Any, inside: list[str], outside: list[str]) -> None:
    assert [each for each in inside if not admits(schema, each)] == []
    assert [each for each in outside if admits(schema, each)] == []


NAME = record("name", name={"const": "a"})
BOTH = record("name", "email", name={"const": "a"}, email={"const": "b"})


@pytest.mark.parametrize(
    "alternatives",
    [
        [NAME, BOTH],
        [record("x", x=NAME), record("x", x=BOTH)],
        [INTEGER, {"type": "number"}],
        [TEXT, {"enum": ["a"]}],
        [{"const": [1, {"a": 2}]}, {"const": [1.0, {"a": 2.0}]}],
        [TEXT | {"pattern": "a"}, TEXT | {"pattern": "b"}],
        [{"type": "array", "items": TEXT}, {"type": "array", "items": INTEGER}],
        [True, TEXT],
        [{}, {}],
    ],
    ids=str,
)
def test_alternatives_that_may_hold_at_once_are_named(alternatives: list[Any]) -> None:
    schema = {"type": "object", "properties": {"a": {"oneOf": alternatives}}}
    _, verdict = checked(schema)
    assert verdict.path == ("properties", "a")
    assert "may hold at once: the keyword 'oneOf' cannot be enforced" in verdict.problem
    _, verdict = checked(schema, strict=False)
    assert verdict.problem == ""


def test_hundreds_of_alternatives_that_a_property_tells_apart() -> None:
    names = [f"k{number}" for number in range(400)]
    schema = {"oneOf": [record("kind", kind={"const": name}) for name in names]}
    assert admits(schema, '{"kind": "k399"}')
    assert not admits(schema, '{"kind": "k400"}')


def test_choices_within_choices_end_in_time() -> None:
    choices = {"anyOf": [TEXT] * 500}
    some = {name: record(name, **{name: TEXT}, x=choices, y=choices) for name in "AB"}
    _, verdict = checked(
        {"oneOf": [{"$ref": "#/$defs/A"}, {"anyOf": [{"$ref": "#/$defs/B"}, {}]}], "$defs": some}
    )
    assert "may hold at once" in verdict.problem
