"""Schemas that refer to themselves: which of their parts have a value that ends."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.generation.grammars.admission import admits, checked

ENDLESS = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}
NODE = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}, "leaf": {"type": "null"}}}


@pytest.mark.parametrize(
    ("node", "place"),
    [
        (ENDLESS, ("$defs", "n")),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/n"}}, ("$defs", "n")),
        ({"type": "array", "minItems": 1, "prefixItems": [{"$ref": "#/$defs/n"}]}, ("$defs", "n")),
        ({"anyOf": [{"$ref": "#/$defs/n"}, ENDLESS]}, ("$defs", "n")),
        ({"anyOf": [{"$ref": "#/$defs/n"}, False]}, ("$defs", "n")),
        (
            {"type": "object", "required": ["a"], "additionalProperties": {"$ref": "#/$defs/n"}},
            ("$defs", "n"),
        ),
        ({"allOf": [{"type": "object"}, ENDLESS]}, ("$defs", "n")),
        ({"$ref": "#/$defs/n"}, ()),
        ({"$ref": "#"}, ()),
    ],
    ids=str,
)
def test_what_no_value_matches_is_refused(node: dict[str, Any], place: tuple[str, ...]) -> None:
    for strict in (True, False):
        _, verdict = checked({"$ref": "#/$defs/n", "$defs": {"n": node}}, strict=strict)
        assert verdict.problem.startswith("no value matches it: ")
        assert verdict.path == place


@pytest.mark.parametrize(
    "node",
    [
        NODE | {"required": ["leaf"]},
        NODE | {"required": ["n"], "type": ["object", "null"]},
        {"anyOf": [{"type": "null"}, NODE | {"required": ["n"]}]},
        {"type": "array", "items": {"$ref": "#/$defs/n"}},
        {"type": "array", "minItems": 1, "prefixItems": [{}, {"$ref": "#/$defs/n"}]},
    ],
    ids=str,
)
def test_what_a_value_matches_is_accepted(node: dict[str, Any]) -> None:
    _, verdict = checked({"$ref": "#/$defs/n", "$defs": {"n": node}})
    assert verdict.problem == ""


def test_a_part_without_values_is_not_begun() -> None:
    reference = {"$ref": "#/$defs/n"}
    schema = {
        "type": "object",
        "properties": {
            "a": {"anyOf": [reference, {"type": "null"}]},
            "b": reference,
            "c": {"items": reference},
        },
        "$defs": {"n": ENDLESS},
    }
    assert admits(schema, '{"a": null, "c": []}')
    assert not admits(schema, '{"a": {"n": 1}}')
    grammar, _ = checked(schema)
    assert json.loads(grammar)["grammars"][0]["json_schema"]["properties"]["b"] is False


def test_a_part_without_values_at_several_names() -> None:
    names = {"enum": ["a", "b"]}
    schema = {"propertyNames": names, "additionalProperties": {"$ref": "#/$defs/n"}, "$defs": {"n": ENDLESS}}
    assert admits({"type": "object"} | schema, "{}")
