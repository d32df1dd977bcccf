"""What is said about a file that does not fit its Struct."""

from __future__ import annotations

import re
from typing import Literal

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


def test_what_fits() -> None:
    assert convert_document({"parts": [{"a-key": "v"}]}, Whole) == Whole(parts=[Part(a_key="v")])
