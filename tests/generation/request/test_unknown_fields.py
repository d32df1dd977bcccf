"""Unknown fields of types whose fields have other names in JSON."""

from __future__ import annotations

import msgspec
import pytest

from penstock.generation.request.unknown_fields import exact_type, unknown_fields


class Inner(msgspec.Struct, kw_only=True, rename="camel"):
    some_text: str | None = None


class Outer(msgspec.Struct, kw_only=True):
    inner: Inner | None = msgspec.field(default=None, name="in")
    notes: list[str] = []  # msgspec copies it


def test_fields_are_known_by_their_names_in_json() -> None:
    assert not unknown_fields(b'{"in": {"someText": "a"}, "notes": []}', Outer)
    found = unknown_fields(b'{"inner": {}, "in": {"some_text": "a"}}', Outer)
    assert [(field.within, field.name) for field in found] == [("", "inner"), ("in.", "some_text")]


def test_an_exact_type_has_the_same_names() -> None:
    exact = exact_type(Outer)
    made = msgspec.json.decode(b'{"in": {"someText": "a"}}', type=exact)
    assert isinstance(made, Outer)
    assert made.inner == exact_type(Inner)(some_text="a")
    assert made.notes == []
    with pytest.raises(msgspec.ValidationError, match="some_text"):
        msgspec.json.decode(b'{"in": {"some_text": "a"}}', type=exact)
