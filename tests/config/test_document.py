"""What is said about a file that does not fit its Struct."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
import pytest

from penstock.config.document import convert_document


class Part(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    a_key: str = ""
    kind: Literal["red", "blue"] = "red"


class Whole(msgspec.Struct, forbid_unknown_fields=True):
    parts: list[Part] | None = None
    named: dict[str, dict[str, Part]] = {}


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (None, "the file: Expected `object`, got `null`"),
        ({"part": []}, "the file: Object contains unknown field `part`; it takes parts, named"),
        ({"parts": [{}, {"b": 1}]}, "parts[1]: Object contains unknown field `b`; it takes a-key, kind"),
        ({"parts": [{"a-key": 3}]}, "parts[0].a-key: Expected `str`, got `int`"),
        (
            {"named": {"good": {"x": {}}, "b.ad": {"x": {}, "y": {"kind": "green"}}}},
            "named.b.ad.y.kind: Invalid enum value 'green'; it takes red, blue",
        ),
        ({"named": {"good": {}, "bad": {3: {}}}}, "a key of named.bad: Expected `str`, got `int`"),
    ],
)
def test_the_place_and_what_is_allowed(said: object, problem: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}$"):
        convert_document(said, Whole)


class Unset(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    key: str | list[str] | msgspec.UnsetType = msgspec.UNSET
    other: Annotated[int, msgspec.Meta(ge=0)] = 0
    share: Annotated[float, msgspec.Meta(le=1)] = 0
    needed: int


def test_all_problems_are_told_at_once() -> None:
    said = {"parts": [{"a-key": 3}, {}, {"kind": "green", "x": 1}], "named": {"a": {"b": 1}}, "more": 1}
    assert problems(said, Whole) == [
        "parts[0].a-key: Expected `str`, got `int`",
        "parts[2].kind: Invalid enum value 'green'; it takes red, blue",
        "parts[2]: Object contains unknown field `x`; it takes a-key, kind",
        "named.a.b: Expected `object`, got `int`",
        "the file: Object contains unknown field `more`; it takes parts, named",
    ]
    assert problems({"key": "k", "other": "x"}, Unset) == [
        "other: Expected `int`, got `str`",
        "the file: Object missing required field `needed`",
    ]
    assert problems({"needed": 1, "other": -1, "share": 2.5}, Unset) == [
        "other: Expected `int` >= 0, got -1",
        "share: Expected `float` <= 1.0, got 2.5",
    ]
    assert problems({"needed": "x"}, Unset) == ["needed: Expected `int`, got `str`"]


def problems(said: object, kind: type) -> list[str]:
    with pytest.raises(ValueError, match=r".*") as told:
        convert_document(said, kind)
    return str(told.value).splitlines()


def test_what_fits() -> None:
    assert convert_document({"parts": [{"a-key": "v"}]}, Whole) == Whole(parts=[Part(a_key="v")])
