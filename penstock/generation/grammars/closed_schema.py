"""Which objects of a JSON schema are closed: they have no properties but those that the schema names.

Schemas made from classes and functions rarely say so, but no class or function takes others, and a small
model goes on inventing them until its tokens are used up. vLLM's default grammars close them as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from penstock.generation.grammars.schema_parts import at, referred, walk

_NAMES = frozenset(("properties", "patternProperties", "additionalProperties", "unevaluatedProperties"))
_ALL = ("allOf",)
_ANY = ("anyOf", "oneOf")
_SINGLE = ("if", "then", "else")
_TURNED = frozenset(("not", "if", "contains", "propertyNames"))
"""Keywords under which a schema that allows less makes the whole allow more."""
_SEVERAL = 2


class Closing:
    """The objects of one schema that are closed: each is named in one place alone. Where the properties of
    one object stand in several places, closing one place would forbid those of the others."""

    def __init__(self, schema: Any, parts: Sequence[dict[str, Any]]) -> None:
        """``parts``: those of ``schema`` that may be closed."""
        self._schema = schema
        self._places: dict[int, int] = {}
        self._joined: set[int] = set()
        self._closed: dict[int, dict[str, Any]] = {}
        turned = _turned(parts)
        met = [part for part in parts if id(part) not in turned]
        for part in met:
            if self._count(part) >= _SEVERAL:
                self._join(part)
        for part in met:
            if id(part) not in self._joined and _is_open(part):
                self._closed[id(part)] = part

    def __contains__(self, part: dict[str, Any]) -> bool:
        """Whether ``part``, one of the schema's own objects, has no properties but those that it names."""
        return id(part) in self._closed or part.get("additionalProperties") is False

    def apply(self) -> bool:
        """Write ``additionalProperties: false``; whether there was anything to write."""
        for part in self._closed.values():
            part["additionalProperties"] = False
        return bool(self._closed)

    def _count(self, part: Any) -> int:
        """The places at which properties of the object that ``part`` describes stand, up to 2."""
        if not isinstance(part, dict):
            return 0
        known = self._places.get(id(part))
        if known is None:
            self._places[id(part)] = _SEVERAL  # for a circle of references
            known = int(_names_properties(part))
            for key, *schemas in self._beside(part):
                counts = [self._count(each) for each in schemas]
                known += max(counts, default=0) if key in _ANY else sum(counts)
            known = self._places[id(part)] = min(known, _SEVERAL)
        return known

    def _join(self, part: Any) -> None:
        waiting = [part]
        while waiting:
            part = waiting.pop()
            if isinstance(part, dict) and id(part) not in self._joined:
                self._joined.add(id(part))
                for _, *schemas in self._beside(part):
                    waiting += schemas

    def _beside(self, part: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
        """Keywords whose schemas apply to the same object as ``part``, with these schemas."""
        for key in (*_ALL, *_ANY):
            if isinstance(part.get(key), list):
                yield key, *part[key]
        for key in _SINGLE:
            if key in part:
                yield key, part[key]
        for key in ("dependentSchemas", "dependencies"):
            if isinstance(part.get(key), dict):
                yield key, *part[key].values()
        if "$ref" in part and (path := referred(self._schema, part["$ref"])) is not None:
            yield "$ref", at(self._schema, path)


def _turned(parts: Iterable[dict[str, Any]]) -> set[int]:
    """The schemas, by id, under keywords that turn their meaning."""
    found: set[int] = set()
    for part in parts:
        for keyword in _TURNED.intersection(part):
            found.update(id(each) for _, each in walk(part[keyword]))
    return found


def _names_properties(part: dict[str, Any]) -> bool:
    if part.get("required") or not _NAMES.isdisjoint(part):
        return True
    values = part.get("enum")
    values = [part.get("const"), *(values if isinstance(values, list) else ())]
    return any(isinstance(value, dict) for value in values)


def _is_open(part: dict[str, Any]) -> bool:
    """Whether the object names properties, and all those that it must have, but allows others."""
    if "additionalProperties" in part or "unevaluatedProperties" in part:
        return False
    named, required = part.get("properties", {}), part.get("required", [])
    if not isinstance(named, dict) or not isinstance(required, list):
        return False
    if "patternProperties" not in part:
        fewest = part.get("minProperties", 0)
        if "properties" not in part or not isinstance(fewest, int) or fewest > len(named):
            return False
    return all(isinstance(name, str) and name in named for name in required)
