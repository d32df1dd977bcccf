"""The parts of a JSON schema: where schemas stand within a schema, and what a reference refers to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Path = tuple[str | int, ...]
"""Keys and indexes that lead to a part of a JSON text."""

_NAMED = frozenset(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"))
_LISTED = frozenset(("anyOf", "allOf", "oneOf", "prefixItems", "items"))
_SINGLE = frozenset(
    (
        "additionalItems",
        "additionalProperties",
        "contains",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    )
)
"""Keywords whose values are schemas: by name, in a list, or one."""


def at(value: Any, path: Path) -> Any:
    for step in path:
        value = value[step]
    return value


def put(value: Any, path: Path, part: Any) -> None:
    at(value, path[:-1])[path[-1]] = part


def replaced(value: Any, path: Path, part: Any) -> Any:
    """``value``, changed in place, with ``part`` at ``path``; ``part`` itself if that is empty."""
    if not path:
        return part
    put(value, path, part)
    return value


def parts(schema: dict[str, Any]) -> Iterator[Path]:
    """Paths of the schemas directly inside ``schema``."""
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            yield from ((key, name) for name in value)
        elif key in _LISTED and isinstance(value, list):
            yield from ((key, index) for index in range(len(value)))
        elif key in _SINGLE and isinstance(value, dict):
            yield (key,)


def objects(schema: Any) -> Iterator[dict[str, Any]]:
    """``schema`` and every schema within it that is an object."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        yield part
        for key, value in part.items():
            if isinstance(value, dict):
                if key in _NAMED:
                    waiting += value.values()
                elif key in _SINGLE:
                    waiting.append(value)
            elif isinstance(value, list) and key in _LISTED:
                waiting += value


def referred(schema: Any, reference: Any) -> Path | None:
    """The path of what ``reference``, a value of ``$ref``, refers to within the whole ``schema``."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    path: Path = ()
    value = schema
    for step in reference[2:].split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        try:
            key: str | int = int(name) if isinstance(value, list) else name
            value = value[key]
        except (LookupError, TypeError, ValueError):
            return None
        path += (key,)
    return path
