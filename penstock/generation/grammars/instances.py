"""Which schemas no value can match, as each of their values would have another one within it, without end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from penstock.generation.grammars.schema_parts import Path, at, parts, put, referred, referred_parts


def forbid_endless(schema: Any) -> Path | None:
    """Write ``false`` for the parts of ``schema`` that no value can match: an output that has begun one would
    not end. Returns the place of such a part if no value matches the whole, None otherwise."""
    found = referred_parts(schema)
    endless = _endless(schema, [part for _, part in found])
    if id(schema) in endless:
        places = [path for path, part in found if id(part) in endless and "$ref" not in part]
        return places[0] if places else ()
    for _, part in found:
        for path in list(parts(part)):
            if id(at(part, path)) in endless:
                put(part, path, False)
    return None


def _endless(schema: Any, found: list[dict[str, Any]]) -> set[int]:
    """The parts, by id, that have no value: what is left when all others are found, from the leaves on."""
    needs: dict[int, set[int]] = {}
    users: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    known = {id(part) for part in found}
    for part in found:
        options = [[each for each in group if each is not False] for group in _needs(part, schema)]
        groups = [
            {id(each) for each in group}
            for group in options
            if group and all(id(each) in known for each in group)
        ]
        needs[id(part)] = set(range(len(groups)))
        for number, group in enumerate(groups):
            for each in group:
                users[each].append((id(part), number))
    ready = [part for part, groups in needs.items() if not groups]
    while ready:
        for user, number in users[ready.pop()]:
            if number in needs[user]:
                needs[user].remove(number)
                if not needs[user]:
                    ready.append(user)
    return {part for part, groups in needs.items() if groups}


def _needs(part: dict[str, Any], schema: Any) -> Iterator[list[Any]]:
    """Lists of schemas: of each list one must have a value, for ``part`` to have one."""
    if (target := referred(schema, part.get("$ref"))) is not None:
        yield [at(schema, target)]
    joined = part.get("allOf")
    yield from ([each] for each in (joined if isinstance(joined, list) else ()))
    for key in ("anyOf", "oneOf"):
        if isinstance(part.get(key), list):
            yield part[key]
    required, named = part.get("required"), part.get("properties", {})
    if part.get("type") == "object" and isinstance(required, list) and isinstance(named, dict):
        other = True if "patternProperties" in part else part.get("additionalProperties")
        yield from ([named.get(name, other)] for name in required if isinstance(name, str))
    fewest = part.get("minItems")
    if part.get("type") == "array" and isinstance(fewest, int):
        first = part.get("prefixItems", part.get("items"))
        first = first if isinstance(first, list) else []
        yield from ([each] for each in first[: max(fewest, 0)])
        rest = part.get("additionalItems" if isinstance(part.get("items"), list) else "items")
        if fewest > len(first) and rest is not None:
            yield [rest]
