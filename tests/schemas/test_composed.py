"""Schemas composed at random: whatever is drawn from their grammars is valid."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

jsonschema = pytest.importorskip("jsonschema", reason="make test-schemas installs it")

from tests.schemas.judge import Judge, Refused, drawn, matcher  # noqa: E402, RUF100

SCHEMAS = 400
NAMES = "abcd"
LEAVES: list[dict[str, Any]] = [
    {},
    {"type": "null"},
    {"type": "boolean"},
    {"type": "integer", "minimum": -2, "maximum": 5},
    {"type": "integer", "multipleOf": 3},
    {"type": "number", "exclusiveMinimum": 1.5},
    {"maximum": 3},
    {"type": "string", "maxLength": 2},
    {"type": "string", "minLength": 2},
    {"type": "string", "pattern": r"^(?!a)\b[ab]+\b"},
    {"type": "string", "pattern": "b$"},
    {"type": ["string", "array", "object"]},
    {"enum": [1, "a", None, True, [1], {"a": 1}]},
    {"enum": ["a", "b", 2]},
    {"const": {"a": 1}},
    {"const": 1.0},
]


class Composer:
    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def whole(self) -> dict[str, Any]:
        return {**self._schema(3), "$defs": {"X": self._object(1), "Y": self._array(1)}}

    def _schema(self, depth: int) -> dict[str, Any]:
        if depth == 0:
            return self._random.choice(LEAVES)
        made = self._random.choice(
            [self._leaf, self._object, self._array, self._reference, self._choice, self._choice]
        )
        return made(depth - 1)

    def _leaf(self, depth: int) -> dict[str, Any]:
        return self._schema(0)

    def _reference(self, depth: int) -> dict[str, Any]:
        return {"$ref": f"#/$defs/{self._random.choice('XY')}"}

    def _choice(self, depth: int) -> dict[str, Any]:
        keyword = self._random.choice(["anyOf", "oneOf", "oneOf", "allOf"])
        beside = self._object(depth) if self._random.random() < 0.4 else {}
        return {**beside, keyword: [self._schema(depth) for _ in range(self._random.randint(1, 3))]}

    def _array(self, depth: int) -> dict[str, Any]:
        parts = {
            "items": self._schema(depth),
            "prefixItems": [self._schema(depth)],
            "minItems": 1,
            "maxItems": 2,
        }
        return {"type": "array", **self._some(parts)}

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._random.sample(NAMES, 2)
        parts = {
            "type": "object",
            "properties": {name: self._schema(depth) for name in names},
            "required": [self._random.choice(NAMES)],
            "additionalProperties": self._random.choice([False, True, self._schema(0)]),
            "maxProperties": 2,
            "not": {"required": [self._random.choice(NAMES)]},
            "unevaluatedProperties": False,
        }
        return self._some(parts)

    def _some(self, parts: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in parts.items() if self._random.random() < 0.4}


@pytest.mark.timeout(600)
def test_whatever_is_drawn_from_a_grammar_is_valid() -> None:
    wrong, accepted = [], 0
    with Judge() as judge:
        for seed in range(SCHEMAS):
            schema = Composer(seed).whole()
            try:
                made = matcher(judge.grammar(schema))
            except Refused:
                continue
            accepted += 1
            validator = jsonschema.Draft202012Validator(schema)
            for text in filter(None, (drawn(made, draw) for draw in range(4))):
                if not validator.is_valid(json.loads(text, parse_constant=str)):
                    wrong.append((json.dumps(schema), text))
    assert wrong == []
    assert accepted > SCHEMAS / 4
