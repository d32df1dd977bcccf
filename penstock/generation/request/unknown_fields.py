"""Unknown fields of a request body and of the objects in it, by its type."""

from __future__ import annotations

import functools
import types
import typing
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

import msgspec

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


class UnknownField(NamedTuple):
    """A field that its object's type does not have."""

    within: str
    """Path of the object: ``response_format.``, ``messages[1].``; empty for the body itself."""
    name: str
    owner: type[msgspec.Struct]


def unknown_fields(body: bytes, type: type[msgspec.Struct]) -> list[UnknownField]:
    """The unknown fields of the JSON object ``body`` and of the objects in it that ``type`` describes.

    Raises msgspec's errors if ``body`` is not a JSON object. Values of the wrong type are passed over.
    """
    found: list[UnknownField] = []
    _search(_decode_fields(body), type, "", found)
    return found


@functools.cache
def exact_type(type: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """A subtype that refuses unknown fields, its own and those of the objects in it."""
    hints = typing.get_type_hints(type, include_extras=True)
    fields: list[tuple[str, Any, Any]] = []
    for field in msgspec.structs.fields(type):
        if field.default_factory is not msgspec.NODEFAULT:
            default = msgspec.field(default_factory=field.default_factory, name=field.encode_name)
        else:
            default = msgspec.field(default=field.default, name=field.encode_name)
        fields.append((field.name, _exact(hints[field.name]), default))
    return msgspec.defstruct(type.__name__, fields, bases=(type,), forbid_unknown_fields=True, kw_only=True)


def with_raw_field(type: type[msgspec.Struct], name: str) -> type[msgspec.Struct]:
    """A subtype in which one field is left undecoded; absent, it is ``null``. It refuses unknown fields."""
    field = (name, msgspec.Raw, msgspec.Raw(b"null"))
    return msgspec.defstruct(type.__name__, [field], bases=(type,), forbid_unknown_fields=True, kw_only=True)


def _exact(annotation: Any) -> Any:
    """``annotation`` with exact types."""
    if _is_struct(annotation):
        return exact_type(annotation)
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extras = get_args(annotation)
        return Annotated[_exact(inner), *extras]
    if origin in (Union, types.UnionType):
        return Union[tuple(map(_exact, get_args(annotation)))]  # noqa: UP007  # the members are computed
    if origin is list:
        return list[_exact(get_args(annotation)[0])]  # type: ignore[misc]
    return annotation


class _Shape(NamedTuple):
    """Where a value has objects of a known type."""

    object: type[msgspec.Struct] | None = None
    """Type of the value, if it is an object."""
    items: _Shape | None = None
    """Shape of the items, if it is a list."""


@functools.cache
def _shapes(type: type[msgspec.Struct]) -> dict[str, _Shape | None]:
    """The fields of ``type`` as JSON names them, with the shapes of those that have objects of a known
    type."""
    hints = typing.get_type_hints(type)
    return {field.encode_name: _shape(hints[field.name]) for field in msgspec.structs.fields(type)}


def _shape(annotation: Any) -> _Shape | None:
    if _is_struct(annotation):
        return _Shape(annotation)
    origin = get_origin(annotation)
    if origin is list:
        items = _shape(get_args(annotation)[0])
        return items and _Shape(items=items)
    if origin in (Union, types.UnionType):
        shapes = [shape for shape in map(_shape, get_args(annotation)) if shape]
        if shapes:
            return _Shape(
                next((shape.object for shape in shapes if shape.object), None),
                next((shape.items for shape in shapes if shape.items), None),
            )
    return None


def _is_struct(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, msgspec.Struct)


def _search(
    fields: dict[str, msgspec.Raw], type: type[msgspec.Struct], within: str, found: list[UnknownField]
) -> None:
    shapes = _shapes(type)
    for name, value in fields.items():
        if name not in shapes:
            found.append(UnknownField(within, name, type))
        elif shape := shapes[name]:
            _search_value(value, shape, within + name, found)


def _search_value(value: msgspec.Raw, shape: _Shape, path: str, found: list[UnknownField]) -> None:
    first = bytes(memoryview(value)[:1])
    if first == b"{" and shape.object:
        _search(_decode_fields(value), shape.object, f"{path}.", found)
    elif first == b"[" and shape.items:
        for index, item in enumerate(_decode_items(value)):
            _search_value(item, shape.items, f"{path}[{index}]", found)
