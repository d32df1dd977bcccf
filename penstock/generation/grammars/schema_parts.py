"""The parts of a JSON schema: where schemas stand within a schema, and what a reference refers to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote

Path = tuple[str | int, ...]
"""Keys and indexes that lead to a part of a JSON text."""

_NAMED = frozenset(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"))
_LISTED = frozenset(("anyOf", "allOf", "oneOf", "prefixItems", "items"))
_PLAIN = "~!$&'()*+,;=:@-._"
"""Characters that need no encoding in the fragment of a URI (RFC 3986, 3.5), besides letters and digits."""
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


def join(part: dict[str, Any], *schemas: dict[str, Any]) -> None:
    """Let ``schemas`` apply to the values of ``part`` as well."""
    joined = part.get("allOf")
    part["allOf"] = [*(joined if isinstance(joined, list) else ()), *schemas]


def parts(schema: dict[str, Any]) -> Iterator[Path]:
    """Paths of the schemas directly inside ``schema``."""
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            yield from ((key, name) for name in value)
        elif key in _LISTED and isinstance(value, list):
            yield from ((key, index) for index in range(len(value)))
        elif key in _SINGLE and isinstance(value, dict):
            yield (key,)


def walk(schema: Any, path: Path = ()) -> Iterator[tuple[Path, dict[str, Any]]]:
    """``schema`` and every schema within it that is an object, each with its path; one before those in it."""
    waiting = [(path, schema)]
    while waiting:
        path, part = waiting.pop()
        if isinstance(part, dict):
            yield path, part
            waiting += [(path + step, at(part, step)) for step in parts(part)]


def referred_parts(schema: Any) -> list[tuple[Path, dict[str, Any]]]:
    """Like :func:`walk`, with what is referred to elsewhere: OpenAPI has its schemas in ``components``."""
    found: list[tuple[Path, dict[str, Any]]] = []
    seen: set[int] = set()
    waiting: list[Path] = [()]
    while waiting:
        root = waiting.pop()
        for path, part in walk(at(schema, root), root):
            if id(part) in seen:
                continue
            seen.add(id(part))
            found.append((path, part))
            if (target := referred(schema, part.get("$ref"))) is not None:
                waiting.append(target)
    return found


def referred(schema: Any, reference: Any) -> Path | None:
    """The path of what ``reference``, a value of ``$ref``, refers to within the whole ``schema``."""
    if reference == "#":
        return ()
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    steps = reference[2:].split("/")
    # RFC 6901, 6: the fragment is percent-encoded. Many generators write the names as they are.
    decoded = _followed(schema, [unquote(step) for step in steps])
    return decoded if decoded is not None or "%" not in reference else _followed(schema, steps)


def _followed(schema: Any, steps: list[str]) -> Path | None:
    path: list[str | int] = []
    value = schema
    for step in steps:
        name = step.replace("~1", "/").replace("~0", "~")
        try:
            key: str | int = int(name) if isinstance(value, list) else name
            value = value[key]
        except (LookupError, TypeError, ValueError):
            return None
        path.append(key)
    return tuple(path)


def reference_to(path: Path) -> str:
    """The value of ``$ref`` that refers to ``path``."""
    names = (str(step).replace("~", "~0").replace("/", "~1") for step in path)
    return "".join(["#", *("/" + quote(name, safe=_PLAIN) for name in names)])
