"""Hostile JSON values for the types of request fields: bounds and beyond, in size, count, depth and type.

Values are JSON text, as some of them are not JSON: NaN, lone surrogates, nesting that no encoder writes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

DEEP = 400
"""Nesting that most parsers take."""
TOO_DEEP = 100_000
MANY = 20_000
LARGE = 300_000
"""Bytes of a large text."""
BIG_BYTES = 20_000
"""A value of more bytes is big: it is sent alone and with few others."""


def values(type: inspect.Type) -> list[bytes]:
    """Values for a field of this type, each once: some that fit and many that do not."""
    return list(dict.fromkeys([*_values(type, 2), *_OF_ANY_TYPE]))


def typed_values(type: inspect.Type) -> list[bytes]:
    """Those of the field's own type only."""
    return list(dict.fromkeys(_values(type, 2)))


def fitting(type: inspect.Type) -> bytes:
    """One value that a field of this type takes."""
    match type:
        case inspect.Metadata(type=inner):
            return fitting(inner)
        case inspect.UnionType(types=types):
            return fitting(next(each for each in types if not isinstance(_bare(each), inspect.NoneType)))
        case inspect.BoolType():
            return b"true"
        case inspect.IntType() | inspect.FloatType():
            return b"1"
        case inspect.StrType():
            return b'"user"'
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            return b"[%b]" % fitting(item)
        case inspect.DictType(key_type=key, value_type=value):
            return b"{%b: %b}" % (_key(key), fitting(value))
        case inspect.StructType(fields=fields):
            needed = [
                b'"%b": %b' % (each.encode_name.encode(), fitting(each.type))
                for each in fields
                if each.required
            ]
            return b"{%b}" % b", ".join(needed)
        case _:
            return b"{}"


def _bare(type: inspect.Type) -> inspect.Type:
    return type.type if isinstance(type, inspect.Metadata) else type


def fields_of(struct: type[msgspec.Struct]) -> tuple[inspect.Field, ...]:
    found = inspect.type_info(struct)
    assert isinstance(found, inspect.StructType)
    return found.fields


_OF_ANY_TYPE = (
    b"null",
    b"true",
    b'""',
    b'"x"',
    b"0",
    b"-1",
    b"1.5",
    b"[]",
    b"{}",
    b"[null]",
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"1" * 5000,
    b'"\\ud800"',
    b'"\xff"',
    b"[" * DEEP + b"]" * DEEP,
    b"[" * TOO_DEEP,
    b'{"a":' * DEEP + b"1" + b"}" * DEEP,
)
_INTS = (
    0,
    1,
    -1,
    2,
    3,
    127,
    1024,
    1025,
    4096,
    2**15,
    2**31 - 1,
    2**31,
    2**32,
    2**63 - 1,
    2**63,
    -(2**63) - 1,
    10**30,
)
_FLOATS = (b"-0.0", b"0.5", b"2", b"-2.1", b"1e-320", b"1e308", b"-1e308", b"1e30")
_TEXTS = (
    "user",
    "a" * 65,
    "a" * 1025,
    "\x00",
    "\r\n\r\n",
    "é\u2028😀",
    "(" * 300,
    "a{1000}{1000}",
    "(a|aa)+$",
    "../../etc",
    '{"$ref": "#"}',
    "start: a\na: a",
    "start: " + "a? " * 200,
    "none",
    "auto",
    "required",
    "text",
    "json_schema",
)
SCHEMAS: tuple[Any, ...] = (
    {"$ref": "#"},
    {"type": "object"},
    {"type": "nonsense"},
    {"enum": []},
    {"enum": list(range(500))},
    {"not": {}},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"type": "array", "minItems": 10**9},
    {"pattern": "((((a*)*)*)*)*b"},
    {"type": "string", "minLength": 10**7},
    {"properties": {f"p{i}": {"type": "string"} for i in range(300)}},
    {"type": "function", "function": {"name": "f"}},
    {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
)


def _values(type: inspect.Type, depth: int) -> Iterator[bytes]:
    """``depth``: levels of structs and lists to enter."""
    match type:
        case inspect.Metadata(type=inner):
            yield from _values(inner, depth)
        case inspect.UnionType(types=types):
            for each in types:
                yield from _values(each, depth)
        case inspect.IntType(ge=least, le=most):
            yield from (b"%d" % number for number in _INTS)
            for bound in (least, most):
                if bound is not None:
                    yield from (b"%d" % (int(bound) + step) for step in (-1, 0, 1))
        case inspect.FloatType():
            yield from _FLOATS
        case inspect.StrType():
            yield from (json.dumps(text).encode() for text in _TEXTS)
            yield b'"%b"' % (b"a" * LARGE)
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            one = fitting(item)
            yield from (b"[%b]" % b",".join([one] * count) for count in (1, 4, 5, 1025, MANY))
            if one == b"1":  # such as token ids
                yield b"[%b]" % b",".join(b"%d" % each for each in range(MANY))
            if depth:
                yield from (b"[%b]" % value for value in _values(item, depth - 1))
                yield from (b"[%b, %b]" % (one, other) for other in itertools.islice(_values(item, 0), 1))
        case inspect.DictType(key_type=key, value_type=value):
            yield from (b"{%b: %b}" % (_key(key), each) for each in _values(value, 0))
            yield b"{%b}" % b",".join(b'"%d": %b' % (each, fitting(value)) for each in range(MANY))
            yield b'{"": %b}' % fitting(value)
            yield from (json.dumps(schema).encode() for schema in SCHEMAS)
        case inspect.StructType(fields=fields) if depth:
            yield fitting(type)
            for field in fields:
                for value in _values(field.type, depth - 1):
                    yield from _with(fields, field.encode_name, value)
        case inspect.AnyType():
            yield from (json.dumps(schema).encode() for schema in SCHEMAS)


def _key(type: inspect.Type) -> bytes:
    return b'"1"' if isinstance(type, inspect.IntType) else b'"name"'


_TYPES = (b'"json_schema"', b'"text"', b'"function"')
"""Values of the field ``type``, which decide what the others mean."""


def _with(fields: tuple[inspect.Field, ...], name: str, value: bytes) -> Iterator[bytes]:
    """Objects with their required fields, and one of them, or another one, of this value."""
    needed = {each.encode_name: fitting(each.type) for each in fields if each.required}
    if "type" in needed and name != "type":
        yield from (json_object(needed | {"type": kind, name: value}) for kind in _TYPES)
    else:
        yield json_object(needed | {name: value})


def json_object(fields: dict[str, bytes]) -> bytes:
    return b"{%b}" % b", ".join(b'"%b": %b' % (name.encode(), value) for name, value in fields.items())
