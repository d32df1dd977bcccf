"""``oneOf`` as ``anyOf``: llguidance has no other way to write a choice of which one alone may hold.

Each alternative is held apart from the others as the client wrote them: open, also where they are closed in
the grammar. An alternative that others exclude only if a property is missing goes without that property.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.generation.grammars.closed_schema import Closing
from penstock.generation.grammars.schema_parts import at, referred
from penstock.generation.grammars.text_match import none_matches

_TYPES = frozenset(("null", "boolean", "integer", "fraction", "string", "array", "object"))
"""``number`` is ``integer`` or ``fraction``."""
_OBJECT = frozenset(("object",))
_ARRAY = frozenset(("array",))
_STRING = frozenset(("string",))
_NUMBER = frozenset(("integer", "fraction"))
_NEVER: dict[str, Any] = {"enum": []}
_OF_TYPES: dict[str, frozenset[str]] = {
    **dict.fromkeys(("type", "$ref", "allOf", "$defs", "definitions", "$schema", "$id", "id"), frozenset()),
    **dict.fromkeys(("properties", "patternProperties", "additionalProperties", "required"), _OBJECT),
    **dict.fromkeys(("minProperties", "maxProperties"), _OBJECT),
    **dict.fromkeys(("items", "prefixItems", "additionalItems", "minItems", "maxItems"), _ARRAY),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), _STRING),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), _NUMBER),
}
"""The types whose values a keyword may forbid; keywords that are not here may forbid any. What ``$ref`` and
``allOf`` refer to is looked at in its own right."""
MAX_WORK = 200_000
"""Maximum schemas that are looked at for one schema, about 0.3 s; what is left counts as not disjoint."""
_MATCHER, _MATCH = 1000, 100
"""The work of a grammar for texts, and of one text."""
MAX_DEPTH = 16
MAX_JOINED = 64
"""Maximum schemas that are taken to apply to one value; leaving out more makes less disjoint."""

Schemas = Sequence[dict[str, Any]]
"""Schemas that all apply to one value."""


class Overlap(ValueError):
    """Two alternatives may hold at once; the message names them."""


class Exclusive:
    """Makes the choices of one schema exclusive."""

    def __init__(self, schema: Any, closing: Closing) -> None:
        self._schema = schema
        self._closing = closing
        self._left = MAX_WORK
        self._joined: dict[int, Schemas] = {}

    def alternatives(self, part: dict[str, Any], beside: Schemas) -> list[Any]:
        """The alternatives of ``oneOf`` in ``part`` for ``anyOf``. ``beside``: further schemas of the same
        value. Raises Overlap."""
        options = part["oneOf"]
        around = [each for each in (part, *beside) if each]
        around = [{key: value for key, value in each.items() if key != "oneOf"} for each in around]
        if self._are_exclusive([self._all_of(option) for option in options]):
            return list(options)
        further: list[list[dict[str, Any]]] = [[] for _ in options]
        for first, second in itertools.permutations(range(len(options)), 2):
            here, there = self._all_of(options[first]), self._all_of(options[second])
            further[first] += self._difference([*around, *here], [*around, *there])
            if _NEVER in further[first]:
                raise Overlap(f"alternatives {first} and {second} may hold at once")
        return [
            {"allOf": [option, *_distinct(more)]} if more else option
            for option, more in zip(options, further, strict=True)
        ]

    def _are_exclusive(self, options: list[Schemas]) -> bool:
        """Whether each has values of its own, or such of a required property: a quick look at many."""
        if not options or not all(options):
            return False
        if _all_differ([_values(each) for each in options]):
            return True
        names = frozenset(name for name in _required(options[0]) if len(options) > 1)
        return all(_shared_types(each) <= _OBJECT for each in options) and any(
            all(name in _required(each) for each in options)
            and _all_differ([_values(self._property(each, name)) for each in options])
            for name in names
        )

    def _difference(self, here: Schemas, there: Schemas) -> list[dict[str, Any]]:
        """What keeps values of ``here`` from matching ``there``; _NEVER: nothing that is known."""
        if self._apart(here, there, MAX_DEPTH):
            return []
        shared = _shared_types([*here, *there])
        # Where neither says anything about a type, its values match both.
        both = frozenset(kind for kind in shared if not _asserts([*here, *there], kind))
        further = []
        if both:
            types = _shared_types(here)
            if types <= both or (both & _NUMBER and not both >= types & _NUMBER):
                return [_NEVER]  # nothing would be left, or fractions alone, which have no name
            further = [_typed(_TYPES - both)]
            if self._apart([*here, *further], there, MAX_DEPTH):
                return further
        absent = _required(there) - _required(here)
        if absent and shared - both == _OBJECT:
            return [*further, _without(absent)]
        return [_NEVER]

    def _all_of(self, part: Any) -> Schemas:
        """``part`` and what applies with it."""
        known = self._joined.get(id(part))
        if known is None:
            found: list[dict[str, Any]] = []
            waiting = [part]
            while waiting and len(found) < MAX_JOINED:
                each = waiting.pop()
                if each is False:
                    return [_NEVER]
                if not isinstance(each, dict):
                    continue
                found.append(each)
                joined = each.get("allOf")
                waiting += joined if isinstance(joined, list) else ()
                if (path := referred(self._schema, each.get("$ref"))) is not None:
                    waiting.append(at(self._schema, path))
            known = self._joined[id(part)] = found
        return known

    def _apart(self, here: Schemas, there: Schemas, depth: int) -> bool:
        """Whether no value that the grammar writes for ``here`` matches ``there``."""
        self._left -= len(here) + len(there)
        if depth == 0 or self._left < 0:
            return False
        shared = _shared_types([*here, *there])
        if not shared or _values_apart(here, there):
            return True
        if shared == _STRING and (self._texts_apart(here, there) or self._texts_apart(there, here)):
            return True
        for kind, sizes in (
            (_NUMBER, ("minimum", "maximum")),
            (_STRING, ("minLength", "maxLength")),
            (_ARRAY, ("minItems", "maxItems")),
        ):
            if shared <= kind and (_below(here, there, *sizes) or _below(there, here, *sizes)):
                return True
        if shared == _OBJECT and self._objects_apart(here, there, depth):
            return True
        return any(
            all(self._apart([*rest, *self._all_of(option)], there, depth - 1) for option in options)
            for options, rest in _choices(here)
        ) or any(
            all(self._apart(here, [*rest, *self._all_of(option)], depth - 1) for option in options)
            for options, rest in _choices(there)
        )

    def _texts_apart(self, here: Schemas, there: Schemas) -> bool:
        values = _values(here)
        if values is None or _values(there) is not None:
            return False
        self._left -= _MATCHER + _MATCH * len(values)
        return self._left > 0 and none_matches((json.loads(each) for each in values if each[0] == '"'), there)

    def _objects_apart(self, here: Schemas, there: Schemas, depth: int) -> bool:
        for some, others, closed in (
            (there, here, self._closing.__contains__),
            (here, there, lambda part: part.get("additionalProperties") is False),
        ):
            for name in _required(some):
                for part in others:
                    if closed(part) and "patternProperties" not in part and name not in _properties(part):
                        return True
        for name in _required([*here, *there]):
            mine, other = self._property(here, name), self._property(there, name)
            if mine and other and self._apart(mine, other, depth - 1):
                return True
        return False

    def _property(self, schemas: Schemas, name: str) -> Schemas:
        """What applies to the property ``name``."""
        return [
            each
            for part in schemas
            if name in (named := _properties(part))
            for each in self._all_of(named[name])
        ]


def _shared_types(schemas: Schemas) -> frozenset[str]:
    shared = _TYPES
    for part in schemas:
        shared &= _types(part)
    return shared


def _all_differ(values: list[frozenset[str] | None]) -> bool:
    known = [each for each in values if each is not None]
    return len(known) == len(values) and len(frozenset().union(*known)) == sum(map(len, known))


def _distinct(schemas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for place, each in enumerate(schemas) if each not in schemas[:place]]


def _asserts(schemas: Schemas, kind: str) -> bool:
    """Whether the schemas may forbid values of a type that they allow."""
    return any(_OF_TYPES.get(key, _TYPES) & {kind} for part in schemas for key in part)


def _typed(types: frozenset[str]) -> dict[str, Any]:
    names = types - _NUMBER | ({"number"} if types >= _NUMBER else types & {"integer"})
    return {"type": sorted(names)}


def _without(names: frozenset[str]) -> dict[str, Any]:
    """Objects that miss one of ``names``."""
    options = [{"properties": {name: False}} for name in sorted(names)]
    return options[0] if len(options) == 1 else {"anyOf": options}


def _choices(schemas: Schemas) -> Iterator[tuple[list[Any], Schemas]]:
    """The alternatives of each choice, and the schemas without it."""
    for place, part in enumerate(schemas):
        for key in ("anyOf", "oneOf"):
            options = part.get(key)
            if isinstance(options, list) and options:
                rest = {name: value for name, value in part.items() if name != key}
                yield options, [*schemas[:place], rest, *schemas[place + 1 :]]


def _required(schemas: Schemas) -> frozenset[str]:
    names = [part.get("required") for part in schemas]
    return frozenset(
        name for each in names if isinstance(each, list) for name in each if isinstance(name, str)
    )


def _properties(part: dict[str, Any]) -> dict[str, Any]:
    named = part.get("properties")
    return named if isinstance(named, dict) else {}


def _types(part: dict[str, Any]) -> frozenset[str]:
    given = part.get("type")
    if isinstance(given, str):
        given = [given]
    types = _TYPES
    if isinstance(given, list):
        types = frozenset(each for each in given if isinstance(each, str))
        types = types | _NUMBER if "number" in types else types
    values = [part["const"]] if "const" in part else part.get("enum")
    return types & frozenset(map(_type, values)) if isinstance(values, list) else types


def _type(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if float(value).is_integer() else "fraction"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _values(schemas: Schemas) -> frozenset[str] | None:
    """The values that are allowed, as texts; None: not only some."""
    found: frozenset[str] | None = None
    for part in schemas:
        values = [part["const"]] if "const" in part else part.get("enum")
        if isinstance(values, list):
            texts = frozenset(map(_text, values))
            found = texts if found is None else found & texts
    return found


def _values_apart(here: Schemas, there: Schemas) -> bool:
    mine, other = _values(here), _values(there)
    return mine is not None and other is not None and mine.isdisjoint(other)


def _text(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    """``value`` with one way to write each number."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _below(low: Schemas, high: Schemas, least: str, most: str) -> bool:
    """Whether all sizes of ``low`` are less than those of ``high``."""
    tops = [part[most] for part in low if isinstance(part.get(most), int | float)]
    ends = [part[least] for part in high if isinstance(part.get(least), int | float)]
    return bool(tops and ends) and min(tops) < max(ends)
