"""Schemas that libraries write and llguidance refuses as they stand."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal
from urllib.parse import quote

import pytest
from pydantic import BaseModel, Field

from tests.generation.grammars.admission import admits as matches
from tests.generation.grammars.admission import checked


class Leaf(BaseModel):
    kind: Literal["leaf"]


class Branch(BaseModel):
    kind: Literal["branch", "twig"]
    left: Annotated[Leaf | Branch, Field(discriminator="kind")]


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
    assert matches(schema, '{"discriminator": null}')
    assert not matches(schema, '{"discriminator": 1}')


@pytest.mark.parametrize("names", [{"type": "string"}, {}, True], ids=str)
def test_names_that_are_any_text(names: Any) -> None:
    schema = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "boolean"}}
    assert matches(schema, '{"a": true}')
    assert not matches(schema, '{"a": 1}')


@pytest.mark.parametrize(
    "name",
    [
        "Größe",
        "用户",
        "Foo<Bar>",
        "Foo[Bar]",
        "a b",
        "a/b",
        "a~b",
        "a%b",
        "a%3Cb",
        "{x}",
        "a^b",
        'a"b',
        "a#b",
        "a?b",
        "",
    ],
)
@pytest.mark.parametrize("encoded", [True, False])
def test_a_reference_to_any_name(name: str, encoded: bool) -> None:
    step = name.replace("~", "~0").replace("/", "~1")
    reference = "#/$defs/" + (quote(step, safe="~") if encoded else step)
    schema = {"$ref": reference, "$defs": {name: {"type": "null"}}}
    assert matches(schema, "null")
    assert not matches(schema, "1")


@pytest.mark.parametrize("address", ["my schema", "Größe", "https://example.com/a"])
def test_an_address_that_nothing_refers_to(address: str) -> None:
    schema = {"$id": address, "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "null"}}}
    assert matches(schema, '{"a": null}')
    assert not matches(schema, '{"a": 1}')


def test_keywords_without_effect() -> None:
    schema = {
        "type": "array",
        "items": {"type": "string", "maxLength": 2.0},
        "uniqueItems": False,
        "then": {"maxItems": 0},
        "minContains": 5,
        "unevaluatedItems": True,
    }
    assert matches(schema, '["aa", "aa"]')
    assert not matches(schema, '["aaa"]')


@pytest.mark.parametrize(
    ("format", "valid", "invalid"),
    [
        ("date", ["2024-02-29", "2000-02-29", "2023-12-31"], ["2023-02-29", "1900-02-29", "2023-04-31"]),
        ("time", ["23:59:60Z", "12:00:00.5+01:30"], ["22:59:60Z", "24:00:00Z", "12:00:00"]),
        ("date-time", ["1998-12-31T23:59:60Z"], ["1998-12-31T23:58:60Z", "2023-02-29T00:00:00Z"]),
    ],
)
def test_days_and_seconds_that_exist(format: str, valid: list[str], invalid: list[str]) -> None:
    schema = {"type": "string", "format": format, "pattern": "[0-9]"}
    assert [each for each in valid if not matches(schema, json.dumps(each))] == []
    assert [each for each in invalid if matches(schema, json.dumps(each))] == []


def test_a_place_is_named_as_the_client_wrote_it() -> None:
    wrong = {"type": "object", "properties": {"k": {"const": "b"}, "x": {"type": "strin"}}, "required": ["k"]}
    right = {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]}
    _, verdict = checked({"oneOf": [right, wrong]})
    assert verdict.path == ("oneOf", 1, "properties", "x")


def test_schemas_that_stand_elsewhere() -> None:
    """As in OpenAPI; what is referred to is rewritten as well."""
    pet = {"type": "object", "properties": {"kind": {"type": "string"}}, "required": ["kind"]}
    cat = {"allOf": [{"$ref": "#/components/schemas/Pet"}, {"properties": {"kind": {"const": "cat"}}}]}
    dog = {
        "allOf": [{"$ref": "#/components/schemas/Pet"}, {"properties": {"kind": {"pattern": r"^\bdog\b$"}}}]
    }
    schema = {
        "oneOf": [{"$ref": "#/components/schemas/Cat"}, {"$ref": "#/components/schemas/Dog"}],
        "discriminator": {"propertyName": "kind"},
        "components": {"schemas": {"Pet": pet, "Cat": cat, "Dog": dog}},
    }
    assert matches(schema, '{"kind": "cat"}')
    assert matches(schema, '{"kind": "dog"}')
    assert not matches(schema, '{"kind": "cow"}')


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"properties": {"a": {}}, "unevaluatedProperties": False}, '{"a": 1}', '{"b": 1}'),
        ({"unevaluatedProperties": {"type": "null"}}, '{"a": null}', '{"a": 1}'),
        ({"prefixItems": [{"type": "null"}], "unevaluatedItems": False}, "[null]", "[null, null]"),
        ({"items": [{"type": "null"}], "unevaluatedItems": False}, "[null]", "[null, null]"),
        ({"items": {"type": "null"}, "unevaluatedItems": False}, "[null]", "[1]"),
    ],
    ids=str,
)
def test_what_is_not_evaluated_is_what_is_not_named(schema: Any, inside: str, outside: str) -> None:
    assert matches(schema, inside)
    assert not matches(schema, outside)


def test_patterns_that_exclude_each_other_are_dropped_where_that_is_allowed() -> None:
    schema = {"type": "object", "patternProperties": {"^a": {"type": "null"}, "a$": {"type": "integer"}}}
    assert "not disjoint" in checked(schema)[1].problem
    assert matches(schema, '{"ba": "x"}', strict=False)


NULLS = {"type": "object", "additionalProperties": {"type": "null"}}


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        (NULLS | {"propertyNames": {"enum": ["a", "b"]}}, '{"a": null}', '{"c": null}'),
        (NULLS | {"propertyNames": {"const": "a"}, "required": ["a"]}, '{"a": null}', "{}"),
        (NULLS | {"propertyNames": {"type": "string", "pattern": r"^x\b"}}, '{"x-a": null}', '{"xa": null}'),
        (NULLS | {"propertyNames": {"maxLength": 2}}, '{"ab": null}', '{"abc": null}'),
        (NULLS | {"propertyNames": {"minLength": 2}}, '{"ab": null}', '{"ab": 1}'),
        ({"propertyNames": {"minLength": 2}}, '{"ab": 1}', '{"a": 1}'),
        ({"properties": {"a": {}, "b": {}}, "not": {"required": ["b"]}}, '{"a": 1}', '{"a": 1, "b": 1}'),
        ({"type": "object", "not": {"required": ["b"]}}, '{"a": 1}', '{"b": 1}'),
        ({"not": {"required": ["b"]}}, '{"a": 1}', "1"),
    ],
    ids=str,
)
def test_names_of_properties(schema: Any, inside: str, outside: str) -> None:
    assert matches(schema, inside)
    assert not matches(schema, outside)


@pytest.mark.parametrize("names", [{"enum": ["a"], "pattern": "b"}, {"not": {"const": "a"}}, False], ids=str)
def test_names_of_other_kinds_are_refused(names: Any) -> None:
    assert "'propertyNames'" in checked({"type": "object", "propertyNames": names})[1].problem


def test_an_escaped_name_is_no_other_name() -> None:
    """JSON reads it as the property that the schema names."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True}
    assert matches(schema, '{"a": 1, "b": "x"}')
    assert not matches(schema, r'{"\u0061": "x"}')
    assert not matches({"patternProperties": {"^a": {}}, "additionalProperties": {}}, r'{"\u0061": 1}')
    assert matches({"type": "string"}, r'"\u0001"')


def test_a_number_of_names_that_may_repeat_is_refused() -> None:
    assert "'minProperties'" in checked({"type": "object", "minProperties": 2})[1].problem
    assert matches({"type": "object", "minProperties": 1}, '{"a": 1}')
    assert matches({"type": "object", "minProperties": 2}, '{"a": 1, "b": 2}', strict=False)
    one = {"properties": {"a": {}}, "required": ["a"], "minProperties": 2, "additionalProperties": True}
    assert matches(one, '{"a": 1, "b": 2}')
    assert not matches(one, '{"a": 1}')
