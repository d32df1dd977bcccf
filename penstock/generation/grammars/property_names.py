"""Which names the properties of an object have, in the keywords that llguidance enforces."""

from __future__ import annotations

from itertools import combinations
from math import comb
from typing import Any

from penstock.generation.grammars.exact_numbers import Inexact
from penstock.generation.grammars.schema_parts import at, join, referred, walk

MAX_NAMES = 200
"""Maximum names of properties that ``propertyNames`` may list."""
MAX_CHOICES = 32
"""Maximum properties that an object may have some of, where ``minProperties`` says how many."""
MAX_COPIES = 2000
"""Maximum schemas that the choice of them makes: ten times as many are more than llguidance takes."""
MAX_OPTIONAL = 500
"""Maximum properties one after another that may be left out: llguidance has four items for each at one place,
and no more than 2,000 items."""
MAX_REFERENCES = 16
_BESIDE = frozenset(
    """$dynamicRef $recursiveRef $ref allOf anyOf contains dependencies dependentSchemas else if not oneOf
    then""".split()  # noqa: SIM905
)


def name_properties(part: dict[str, Any], schema: Any) -> None:
    """Write what ``part``, of ``schema``, says of names and of what is not named by names and patterns."""
    _name_unevaluated(part)
    _list_names(part, schema)
    _forbid_required(part)


def _name_unevaluated(part: dict[str, Any]) -> None:
    """Where nothing else speaks of the same value, ``unevaluated…`` are those that are not named."""
    if not _BESIDE.isdisjoint(part):
        return
    rest = "additionalItems" if isinstance(part.get("items"), list) else "items"
    for keyword, other in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", rest)):
        if keyword in part:
            value = part.pop(keyword)
            part.setdefault(other, value)


def _list_names(part: dict[str, Any], schema: Any) -> None:
    """``propertyNames`` of an object that names none itself, such as zod's records, as names and patterns."""
    names = part.get("propertyNames")
    for _ in range(MAX_REFERENCES):  # pydantic writes an enumeration of names as a reference
        if isinstance(names, dict) and names.keys() == {"$ref"}:
            target = referred(schema, names["$ref"])
            names = names if target is None else at(schema, target)
    if not isinstance(names, dict) or not {"properties", "patternProperties"}.isdisjoint(part):
        return
    part["propertyNames"] = names
    value = part.get("additionalProperties", {})
    allowed = [names["const"]] if "const" in names else names.get("enum")
    said = names.keys() - {"type"}
    if said <= {"const", "enum"} and isinstance(allowed, list) and 0 < len(allowed) <= MAX_NAMES:
        part["properties"] = {name: value for name in allowed if isinstance(name, str)}
    elif names.get("type", "string") != "string" or len(said) != 1:
        return
    elif isinstance(names.get("pattern"), str):
        part["patternProperties"] = {names["pattern"]: value}
    elif said & {"minLength", "maxLength"}:
        part["patternProperties"] = {
            f"^[^]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$": value
        }
    else:
        return
    del part["propertyNames"]
    part["additionalProperties"] = False


def _forbid_required(part: dict[str, Any]) -> None:
    """``not`` with a property that is ``required``: the value is an object, as others have no properties to
    miss, and goes without it."""
    if not isinstance(part.get("not"), dict) or part["not"].keys() != {"required"}:
        return
    missing, named = part["not"]["required"], part.get("properties", {})
    if part.get("type", "object") != "object" or not isinstance(named, dict):
        return
    if isinstance(missing, list) and len(missing) == 1 and isinstance(missing[0], str):
        if not named:  # an object that names no others may have them
            part.setdefault("additionalProperties", True)
        part["type"] = "object"
        part["properties"] = {**named, missing[0]: False}
        del part["not"]


def check_optional(part: dict[str, Any]) -> None:
    """Raises Inexact if too many properties one after another may be left out."""
    named, required = part.get("properties"), part.get("required")
    if not isinstance(named, dict) or len(named) <= MAX_OPTIONAL:
        return
    needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    row = 0
    for name, value in named.items():
        row = 0 if name in needed else row + (value is not False)
        if row > MAX_OPTIONAL:
            raise Inexact(
                f"the keyword 'properties' is too large: at most {MAX_OPTIONAL} properties one after another "
                "may be optional"
            )


def _copies(part: dict[str, Any], choices: int) -> int:
    """Schemas that a choice makes of ``part``, which each alternative has a copy of."""
    return choices * sum(1 for _ in walk(part))


def count_properties(part: dict[str, Any], *, strict: bool) -> None:
    """Require properties instead of ``minProperties``, of which llguidance counts neither those that may be
    left out nor repeated names as one. Raises Inexact, or drops it unless ``strict``, where names are open or
    there are too many ways to have so many."""
    fewest, required, named = part.get("minProperties"), part.get("required", []), part.get("properties", {})
    if not isinstance(fewest, int) or not isinstance(required, list) or not isinstance(named, dict):
        return
    missing = fewest - len(set(map(str, required)))
    free = [name for name, value in named.items() if value is not False and name not in required]
    problem = ""
    if part.get("additionalProperties") is not False or part.get("patternProperties"):
        if missing <= 1:  # one more name is another one than those required
            return
        problem = "names may repeat"
    elif not 0 < missing <= len(free):
        return
    elif missing < len(free) and (
        len(free) > MAX_CHOICES or _copies(part, comb(len(free), missing)) > MAX_COPIES
    ):
        problem = "there are too many properties to choose from"
    if problem and strict:
        raise Inexact(f"{problem}: the keyword 'minProperties' cannot be enforced")
    del part["minProperties"]
    if not problem:
        choices = [{"required": [*required, *names]} for names in combinations(free, missing)]
        join(part, choices[0] if len(choices) == 1 else {"anyOf": choices})
