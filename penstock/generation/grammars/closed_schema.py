"""Closes the objects of a JSON schema: they have no properties but those that the schema names.

Schemas made from classes and functions rarely say so, but no class or function takes others, and a small
model goes on inventing them until its tokens are used up. vLLM's default grammars close them as well.
"""

from __future__ import annotations

import json
from typing import Any

from penstock.generation.grammars.schema_parts import objects

_NAMES = ("properties", "patternProperties")
_JOINED = frozenset(("$ref", "anyOf", "oneOf", "dependentSchemas"))
"""Keywords whose schemas apply beside the properties of their own object."""
_TURNED = frozenset(("not", "if", "contains"))
"""Keywords under which a schema that allows less makes the whole allow more."""


def closed(schema: Any) -> Any:
    """``schema`` with ``additionalProperties: false`` in objects that name properties and do not set it.

    A schema in which the properties of one object stand in several places stays as it is: closed, each place
    would forbid those of the others.
    """
    opened = False
    for part in objects(schema):
        if _is_composed(part):
            return schema
        opened = opened or _is_open(part)
    if not opened:
        return schema
    schema = json.loads(json.dumps(schema))  # the caller's own is also the chat template's
    for part in objects(schema):
        if _is_open(part):
            part["additionalProperties"] = False
    return schema


def _is_composed(part: dict[str, Any]) -> bool:
    joined = part.get("allOf")
    several = isinstance(joined, list) and len(joined) > 1
    named = any(key in part for key in _NAMES)
    return (
        several
        or not _TURNED.isdisjoint(part)
        or (named and ("allOf" in part or not _JOINED.isdisjoint(part)))
    )


def _is_open(part: dict[str, Any]) -> bool:
    """Whether the object names properties, and all those that it requires, but allows others."""
    if "additionalProperties" in part or "unevaluatedProperties" in part:
        return False
    if "patternProperties" in part:
        return True
    named, required = part.get("properties"), part.get("required", [])
    if not isinstance(named, dict) or not isinstance(required, list):
        return False
    return all(isinstance(name, str) and name in named for name in required)
