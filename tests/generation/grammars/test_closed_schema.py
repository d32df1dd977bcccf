from __future__ import annotations

from typing import Any

import pytest

from penstock.generation.grammars.closed_schema import closed

BOOLEAN = {"type": "boolean"}
OPEN = {"type": "object", "properties": {"a": BOOLEAN}}
CLOSED = OPEN | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (OPEN, CLOSED),
        ({"type": "array", "items": OPEN}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [OPEN, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"$defs": {"A": OPEN}, "$ref": "#/$defs/A"}, {"$defs": {"A": CLOSED}, "$ref": "#/$defs/A"}),
        ({"allOf": [OPEN]}, {"allOf": [CLOSED]}),
        ({"const": OPEN}, {"const": OPEN}),
    ],
    ids=str,
)
def test_objects_that_name_their_properties_are_closed(schema: Any, expected: Any) -> None:
    before = repr(schema)
    assert closed(schema) == expected
    assert repr(schema) == before


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        OPEN | {"additionalProperties": True},
        OPEN | {"additionalProperties": BOOLEAN},
        OPEN | {"unevaluatedProperties": BOOLEAN},
        OPEN | {"required": ["b"]},
        {"allOf": [OPEN, {"properties": {"b": BOOLEAN}}]},
        OPEN | {"anyOf": [{"properties": {"b": BOOLEAN}}]},
        OPEN | {"$ref": "#/$defs/A"},
        {"not": OPEN},
        {"properties": 1},
        True,
    ],
    ids=str,
)
def test_what_may_have_others_stays(schema: Any) -> None:
    assert closed(schema) == schema
