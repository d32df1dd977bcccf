"""Reads what a YAML file says as a Struct, and tells what is wrong in it, where, and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

T = TypeVar("T")


def convert_document(said: Any, kind: type[T]) -> T:
    """``said`` as ``kind``. Raises ValueError with all that is wrong, a line each, which quotes no texts but
    those of choices: they may be secrets."""
    try:
        return msgspec.convert(said, kind)
    except msgspec.ValidationError:
        raise ValueError("\n".join(_problems(said, kind, ""))) from None


def _problems(said: Any, kind: Any, place: str) -> list[str]:
    """What is wrong with ``said``, which does not fit: in each of its parts, and in itself without these."""
    bad = {key: (name, part, its) for key, name, part, its in _parts(said, kind) if not _fits(part, its)}
    found = [each for name, part, its in bad.values() for each in _problems(part, its, place + name)]
    if isinstance(said, dict):
        said = {key: part for key, part in said.items() if key not in bad}
    elif bad:
        return found
    try:
        msgspec.convert({"value": said}, _holder(kind))
    except msgspec.ValidationError as error:
        problem, _, at = str(error).partition(" - at ")
        missing = problem.partition("missing required field `")[2].rstrip("`")
        if not bad or "unknown field" in problem or (missing and missing not in bad):
            inner, value, allowed = _resolve(said, kind, _STEP.findall(at)[1:])
            where = (place + inner).lstrip(".") or "the file"
            whose = "a key of " if at.startswith(_OF_A_KEY) else ""
            found.append(f"{whose}{where}: {problem}{_in_words(problem, value, allowed)}")
    return found


def _parts(said: Any, kind: Any) -> Iterator[tuple[Any, str, Any, Any]]:
    """The parts of a value: each with its key, how that is written, and what it may be."""
    for member in _members(kind):
        if hasattr(member, "__struct_fields__") and isinstance(said, dict):
            hints = get_type_hints(member, include_extras=True)
            for field, name in zip(member.__struct_fields__, member.__struct_encode_fields__, strict=True):
                if name in said:
                    yield name, f".{name}", said[name], hints[field]
        elif get_origin(member) is dict and isinstance(said, dict):
            yield from ((key, f".{key}", part, get_args(member)[1]) for key, part in said.items())
        elif get_origin(member) is list and isinstance(said, list):
            yield from ((key, f"[{key}]", part, get_args(member)[0]) for key, part in enumerate(said))


_OF_A_KEY = "`key` in "
_STEP = re.compile(r"\.([^.\[\]`]+)|\[(\d+|\.\.\.)\]")
"""A field, or an index; ``...``: some value of a mapping."""


@lru_cache(256)
def _holder(kind: Any) -> type[msgspec.Struct]:
    """A Struct whose only field is of this kind: msgspec crashes where it converts to some unions alone."""
    return msgspec.defstruct("_Holder", [("value", kind)])


def _resolve(said: Any, kind: Any, steps: list[tuple[str, str]]) -> tuple[str, Any, Any]:
    """The place of a problem, with the names that its steps leave out, what is there, and the type that is
    allowed there."""
    place = ""
    for field, index in steps:
        name, said, kind = _enter(said, kind, field, index)
        place += name
    return place, said, kind


def _enter(said: Any, kind: Any, field: str, index: str) -> tuple[str, Any, Any]:
    """One step: how it is written, and what is there."""
    for member in _members(kind):
        if field and hasattr(member, "__struct_fields__"):
            at = member.__struct_encode_fields__.index(field)
            hints = get_type_hints(member, include_extras=True)
            return f".{field}", said[field], hints[member.__struct_fields__[at]]
        if index == "..." and get_origin(member) is dict:
            inner = get_args(member)[1]
            key = next(key for key, value in said.items() if not _fits(value, inner))
            return f".{key}", said[key], inner
        if index not in ("", "...") and get_origin(member) is list:
            return f"[{index}]", said[int(index)], get_args(member)[0]
    return f".{field}" if field else f"[{index}]", None, Any


def _members(kind: Any) -> tuple[Any, ...]:
    """The types that a value may have."""
    if get_origin(kind) is Annotated:
        return _members(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return tuple(member for each in get_args(kind) for member in _members(each))
    return (kind,)


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert({"value": value}, _holder(kind))
    except msgspec.ValidationError:
        return False
    return True


def _in_words(problem: str, value: Any, kind: Any) -> str:
    """A number that is too small or too large, and what is allowed, where the problem does not say it."""
    if type(value) in (int, float) and re.match(r"Expected `(int|float)` [<>]", problem):
        return f", got {value}"
    for each in _members(kind):
        if "unknown field" in problem and hasattr(each, "__struct_encode_fields__"):
            return f"; it takes {', '.join(each.__struct_encode_fields__)}"
        if "Invalid enum value" in problem and get_origin(each) is Literal:
            return f"; it takes {', '.join(get_args(each))}"
        if each is datetime:
            return "; it takes a time with its zone, such as 2030-12-31T18:00:00Z"
    return ""
