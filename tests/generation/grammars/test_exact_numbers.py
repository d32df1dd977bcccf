from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
from llguidance import LLMatcher

from tests.generation.grammars.admission import TOKENIZER, admits, checked, grammar_admits

INTEGER = {"type": "integer"}
NUMBER = {"type": "number"}
DOUBLE = 1.7976931348623157e308


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        (
            INTEGER | {"minimum": -(2**63), "maximum": 2**63 - 1},
            [0, 2**63 - 1, -(2**62)],
            [2**63, -(2**63) - 1],
        ),
        (INTEGER | {"minimum": 0, "maximum": 2**64 - 1}, [0, 2**63 - 1], [-1, 2**64]),
        (INTEGER | {"exclusiveMinimum": 2**53}, [2**53 + 2], [2**53]),
        (INTEGER | {"minimum": 2**53 + 1}, [2**53 + 2], [2**53]),
        (INTEGER | {"maximum": 2**53 + 3}, [2**53 + 2], [2**53 + 4]),
        (INTEGER | {"minimum": 0.5, "exclusiveMaximum": 2}, [1], [0, 2]),
        (NUMBER | {"minimum": 2**53 + 1, "maximum": 2**53 + 5}, [2**53 + 4], [2**53, 2**53 + 6]),
        (NUMBER | {"minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38}, [0, 1.5, -10], []),
        (NUMBER | {"minimum": -DOUBLE, "maximum": DOUBLE}, [0, 1.5, -10], []),
        (NUMBER | {"minimum": 5e-324}, [1, 0.25], [0, -1]),
        (NUMBER | {"maximum": -5e-324}, [-1], [0, 1]),
        (NUMBER | {"minimum": -5e-324}, [0, 1], [-1]),
        (NUMBER | {"minimum": 10**18}, [10**18], [1]),
        (NUMBER | {"minimum": 0, "exclusiveMinimum": True}, [1], [0]),
        ({"type": ["integer", "null"], "maximum": 10**30}, [1], []),
        ({"enum": [2**53, 1.5, {"a": [-(2**62)]}]}, [2**53, 1.5], [2**53 + 1]),
        (NUMBER | {"multipleOf": 0.01}, [0.05], [0.005]),
        (NUMBER | {"exclusiveMinimum": 0.1}, [0.11, 0.1000000000000001], [0.1, "0.1" + "0" * 40 + "4"]),
        (NUMBER | {"exclusiveMinimum": 0, "exclusiveMaximum": 1}, [0.1], [0, 1, "0." + "0" * 400 + "1"]),
        (NUMBER | {"exclusiveMaximum": -2}, [-2.5, -3], [-2, "-2." + "0" * 40 + "1"]),
    ],
    ids=str,
)
def test_numbers_are_enforced_exactly(schema: dict[str, Any], inside: list[Any], outside: list[Any]) -> None:
    assert [each for each in inside if not admits(schema, str(each))] == []
    assert [each for each in outside if admits(schema, str(each))] == []


@pytest.mark.parametrize(
    ("schema", "number"),
    [
        ({"const": 2**53 + 1}, 2**53 + 1),
        ({"const": 12345678901234567890123}, 12345678901234567890123),
        ({"enum": ["a", [{"b": 98765432109876543210987}]]}, 98765432109876543210987),
        (INTEGER | {"minimum": 2**53 + 1, "maximum": 2**53 + 1}, 2**53 + 1),
        (INTEGER | {"minimum": 2**64}, 2**64),
        (INTEGER | {"maximum": -(2**70)}, -(2**70)),
        (NUMBER | {"minimum": 92.23332318878143, "maximum": 92.23332318878143}, 92.23332318878143),
        ({"const": 92.23332318878143}, 92.23332318878143),
        ({"enum": [1, {"a": [-10.384532106638279]}]}, -10.384532106638279),
        (NUMBER | {"multipleOf": 4294967311}, 4294967311),
        (NUMBER | {"multipleOf": 10**400}, 10**40),
    ],
    ids=str,
)
def test_a_number_that_cannot_be_enforced_is_named(schema: dict[str, Any], number: float) -> None:
    _, verdict = checked({"type": "object", "properties": {"id": schema}})
    assert verdict.path == ("properties", "id")
    assert str(number)[:40] in verdict.problem
    assert verdict.problem.endswith("cannot be enforced")
    assert (
        admits({"type": "object", "properties": {"id": schema}}, '{"id": 7}', strict=False)
        or "enum" in schema
    )


def test_a_value_that_is_dropped_keeps_its_type() -> None:
    schema = {"enum": [2**64 + 1, None]}
    assert admits(schema, str(2**64 + 1), strict=False)
    assert admits(schema, "null", strict=False)
    assert not admits(schema, '"x"', strict=False)


def test_bounds_beyond_64_bits_are_dropped_where_that_is_allowed() -> None:
    schema = INTEGER | {"minimum": 0, "maximum": 2**64 - 1}
    assert admits(schema, str(2**64 - 1), strict=False)
    assert not admits(schema, "-1", strict=False)


def random_floats() -> list[float]:
    """Of 1 to 17 digits and any size that 64 bits have."""
    random = Random(5)
    return [
        float(f"{random.choice('-+')}{random.randrange(10 ** (digits - 1), 10**digits)}e{power - digits}")
        for digits in range(1, 18)
        for power in range(-9, 19)
    ]


def test_a_value_is_written_as_it_is_or_refused() -> None:
    refused = 0
    for value in random_floats():
        grammar, verdict = checked({"const": value})
        if verdict.problem:
            assert str(value) in verdict.problem
            refused += 1
            continue
        assert float(TOKENIZER.decode_str(LLMatcher(TOKENIZER, grammar).compute_ff_tokens())) == value
    assert 0 < refused < 0.2 * len(random_floats())


def test_no_float_beside_a_bound_is_written() -> None:
    for value in random_floats():
        if abs(value) > 2**53:  # the next float is another integer there, which may have no decimals
            continue
        for keyword, outward in (("minimum", -math.inf), ("maximum", math.inf)):
            grammar, verdict = checked(NUMBER | {keyword: value})
            assert verdict.problem == ""
            assert not grammar_admits(grammar, f"{math.nextafter(value, outward):.60f}")
            inside = value
            for _ in range(20):
                inside = math.nextafter(inside, -outward)
            assert grammar_admits(grammar, f"{inside:.60f}")
