from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.generation.grammars.closed_schema import Closing
from penstock.generation.grammars.schema_parts import referred_parts

BOOLEAN = {"type": "boolean"}
OPEN = {"type": "object", "properties": {"a": BOOLEAN}}
CLOSED = OPEN | {"additionalProperties": False}
OTHER = {"properties": {"b": BOOLEAN}}


def closed(schema: Any) -> Any:
    made = json.loads(json.dumps(schema))
    Closing(made, [part for _, part in referred_parts(made)]).apply()
    return made


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (OPEN, CLOSED),
        ({"type": "array", "items": OPEN}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [OPEN, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"anyOf": [OPEN, OPEN]}, {"anyOf": [CLOSED, CLOSED]}),
        ({"$defs": {"A": OPEN}, "$ref": "#/$defs/A"}, {"$defs": {"A": CLOSED}, "$ref": "#/$defs/A"}),
        ({"allOf": [OPEN]}, {"allOf": [CLOSED]}),
        ({"const": OPEN}, {"const": OPEN}),
        ({"$ref": "#/x/A", "x": {"A": OPEN, "B": OPEN}}, {"$ref": "#/x/A", "x": {"A": CLOSED, "B": OPEN}}),
        (
            {"properties": {"x": {"allOf": [OPEN, OTHER]}, "y": OPEN}, "additionalProperties": False},
            {"properties": {"x": {"allOf": [OPEN, OTHER]}, "y": CLOSED}, "additionalProperties": False},
        ),
    ],
    ids=str,
)
def test_objects_that_name_their_properties_are_closed(schema: Any, expected: Any) -> None:
    assert closed(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        OPEN | {"additionalProperties": True},
        OPEN | {"additionalProperties": BOOLEAN},
        OPEN | {"unevaluatedProperties": BOOLEAN},
        OPEN | {"required": ["b"]},
        OPEN | {"minProperties": 2},
        {"patternProperties": {"^x": BOOLEAN}, "required": ["y"]},
        {"allOf": [OPEN, OTHER]},
        {"allOf": [OTHER], "oneOf": [OPEN, {"type": "null"}]},
        {"required": ["b"], "anyOf": [OPEN]},
        {"enum": [{"a": True, "b": 1}], "allOf": [OPEN]},
        {"allOf": [{"$ref": "#/$defs/A"}, OTHER], "$defs": {"A": OPEN}},
        {"allOf": [{"allOf": [{"$ref": "#"}]}, OPEN]},
        OPEN | {"anyOf": [OTHER]},
        OPEN | {"$ref": "#/$defs/A", "$defs": {"A": OTHER}},
        {"not": OPEN},
        {"properties": 1},
        True,
    ],
    ids=str,
)
def test_what_may_have_others_stays(schema: Any) -> None:
    assert closed(schema) == schema
