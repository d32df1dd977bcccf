"""Rewrites what llguidance refuses in a JSON schema to what it takes and means the same.

- A keyword that JSON Schema does not have asserts nothing (2020-12, core, 4.3.1), but next to a ``$ref`` of a
  recursive schema llguidance takes it for an assertion. pydantic writes ``discriminator``, for example.
- ``oneOf`` whose alternatives cannot hold at once is ``anyOf``; llguidance does not see that of alternatives
  that are recursive.
- ``propertyNames`` that are any text, as zod writes them, are those of every object.
"""

from __future__ import annotations

from typing import Any

from penstock.generation.grammars.schema_parts import at, objects, referred

_KEYWORDS = frozenset(
    """$anchor $comment $defs $dynamicAnchor $dynamicRef $id $recursiveAnchor $recursiveRef $ref $schema
    additionalItems additionalProperties allOf anyOf const contains definitions dependencies dependentRequired
    dependentSchemas description else enum exclusiveMaximum exclusiveMinimum format id if items maxContains
    maxItems maxLength maxProperties maximum minContains minItems minLength minProperties minimum multipleOf
    not oneOf pattern patternProperties prefixItems properties propertyNames required then title type
    unevaluatedItems unevaluatedProperties uniqueItems x-guidance""".split()  # noqa: SIM905
)
"""Of all versions of JSON Schema, and the one of llguidance's options."""
_ANY_NAME: tuple[Any, ...] = ({"type": "string"}, {}, True)
MAX_REFERENCES = 16
"""Maximum references to follow from one alternative; more make a circle, or nothing to rely on."""


def simplify(schema: Any) -> bool:
    """Rewrite ``schema`` in place; whether anything was changed."""
    changed = False
    for part in objects(schema):
        for keyword in part.keys() - _KEYWORDS:
            del part[keyword]
            changed = True
        if part.get("propertyNames") in _ANY_NAME:
            del part["propertyNames"]
            changed = True
        if "oneOf" in part and "anyOf" not in part and _exclude_each_other(schema, part["oneOf"]):
            part["anyOf"] = part.pop("oneOf")
            changed = True
    return changed


def _exclude_each_other(schema: Any, alternatives: Any) -> bool:
    """Whether all are objects that one required property tells apart."""
    if not isinstance(alternatives, list) or not alternatives:
        return False
    tags = [_tags(schema, alternative) for alternative in alternatives]
    return any(
        len(frozenset().union(*(each[name] for each in tags))) == sum(len(each[name]) for each in tags)
        for name in tags[0]
        if all(name in each for each in tags)
    )


def _tags(schema: Any, alternative: Any) -> dict[str, frozenset[str]]:
    """The texts that each required property of an object may have, of those that have a list of them."""
    part = _resolved(schema, alternative)
    if part.get("type") != "object" or not isinstance(part.get("properties"), dict):
        return {}
    required = part.get("required")
    found = {}
    for name in required if isinstance(required, list) else ():
        value = _resolved(schema, part["properties"].get(name)) if isinstance(name, str) else {}
        allowed = [value["const"]] if "const" in value else value.get("enum")
        if isinstance(allowed, list) and all(isinstance(each, str) for each in allowed):
            found[name] = frozenset(allowed)
    return found


def _resolved(schema: Any, part: Any) -> dict[str, Any]:
    """``part`` or what it refers to; empty if that is no object."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(part, dict):
            return {}
        path = referred(schema, part.get("$ref"))
        if path is None:
            return part
        part = at(schema, path)
    return {}
