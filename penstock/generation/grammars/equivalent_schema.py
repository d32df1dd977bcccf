"""Rewrites a JSON schema for llguidance: what it refuses, or enforces only roughly, to what it takes.

What matches the result matches the schema. Where a schema has what no rewriting can enforce, it is refused,
or loses that where the client allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from penstock.generation.grammars.closed_schema import Closing
from penstock.generation.grammars.enforceable_pattern import enforceable
from penstock.generation.grammars.exact_numbers import Inexact, fit
from penstock.generation.grammars.exclusive import Exclusive, Overlap
from penstock.generation.grammars.instances import forbid_endless
from penstock.generation.grammars.pattern_syntax import Unenforceable
from penstock.generation.grammars.property_names import check_optional, count_properties, name_properties
from penstock.generation.grammars.schema_parts import Path, join, reference_to, referred, referred_parts

_KEYWORDS = frozenset(
    """$anchor $comment $defs $dynamicAnchor $dynamicRef $id $recursiveAnchor $recursiveRef $ref $schema
    additionalItems additionalProperties allOf anyOf const contains definitions dependencies dependentRequired
    dependentSchemas else enum exclusiveMaximum exclusiveMinimum format id if items maxContains maxItems
    maxLength maxProperties maximum minContains minItems minLength minProperties minimum multipleOf not oneOf
    pattern patternProperties prefixItems properties propertyNames required then type unevaluatedItems
    unevaluatedProperties uniqueItems x-guidance""".split()  # noqa: SIM905
)
"""Keywords that assert anything, of all versions of JSON Schema, and the one of llguidance's options.
Others assert nothing (2020-12, core, 4.3.1), but next to a ``$ref`` of a recursive schema llguidance takes
them for assertions. pydantic writes ``discriminator``, for example."""
_ANY: tuple[Any, ...] = ({}, True)
_WITHOUT_EFFECT: dict[str, Callable[[dict[str, Any]], bool]] = {
    # zod writes ``propertyNames`` that are any text.
    "propertyNames": lambda part: part["propertyNames"] in ({"type": "string"}, *_ANY),
    "uniqueItems": lambda part: part["uniqueItems"] is False or part.get("maxItems") in (0, 1),
    "if": lambda part: "then" not in part and "else" not in part,
    "then": lambda part: "if" not in part,
    "else": lambda part: "if" not in part,
    "minContains": lambda part: "contains" not in part,
    "maxContains": lambda part: "contains" not in part,
    "not": lambda part: part["not"] is False,
    "dependentRequired": lambda part: not part["dependentRequired"],
    "unevaluatedItems": lambda part: part["unevaluatedItems"] in _ANY,
    "unevaluatedProperties": lambda part: part["unevaluatedProperties"] in _ANY,
}
_NAMING = frozenset(("properties", "patternProperties", "required"))
_ESCAPES = 'nrbtf"\\'
"""What may follow a backslash in strings where an object has names beside those that its schema speaks of:
written as ``\\u0061``, llguidance would take a name for another one."""
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_TIME = (
    r"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
    r"|23:59:60(?:\.[0-9]+)?(?:[zZ]|[+-]00:00))"
)
_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[tT]{_TIME}$"}
"""Formats of RFC 3339, with leap days and leap seconds where they can be."""


class Unfit(ValueError):
    """A part cannot be enforced. The message says why."""

    def __init__(self, problem: str, path: Path) -> None:
        super().__init__(problem)
        self.path = path


def rewrite(schema: Any, is_loose: Callable[[Path], bool], *, close: bool = True) -> None:
    """Rewrite ``schema`` in place. ``is_loose``: whether the part at a path may lose what cannot be enforced;
    ``close``: whether objects that name properties have no others. Raises Unfit."""
    found = referred_parts(schema)
    targets = _resolve_references(schema, found)
    _drop_other_keywords(found, targets)
    for _, part in found:
        name_properties(part, schema)
    written = [(part, *_rewrite_part(path, part, is_loose)) for path, part in found]
    for (_, part), target in zip(found, targets, strict=True):
        if target is not None:
            part["$ref"] = reference_to(target)
    for part, patterns, names in written:
        _write(part, patterns, names)
    closing = Closing(schema, [part for _, part in found] if close else [])
    _choose(schema, found, closing, is_loose)
    closing.apply()
    for path, part in found:
        try:
            check_optional(part)
            count_properties(part, strict=not is_loose(path))
        except Inexact as error:
            raise Unfit(str(error), path) from None
    if (endless := forbid_endless(schema)) is not None:
        raise Unfit("no value matches it: each would have another one within it, without end", endless)
    if any(_has_other_names(part) for _, part in found) and isinstance(schema, dict):
        schema["x-guidance"] = {"json_allowed_escapes": _ESCAPES, **schema.get("x-guidance", {})}


def _resolve_references(schema: Any, found: Sequence[tuple[Path, dict[str, Any]]]) -> list[Path | None]:
    """The path that each part refers to; None: to no part of this schema. Addresses of the schema that
    nothing uses are dropped: they need not be valid."""
    has_resources = any(path and _is_address(part.get("$id")) for path, part in found)
    is_foreign = any(not str(part.get("$ref", "#")).startswith("#") for _, part in found)
    if not is_foreign and isinstance(schema, dict):
        for key in ("$id", "id"):
            if isinstance(schema.get(key), str):
                del schema[key]
    return [None if has_resources else referred(schema, part.get("$ref")) for _, part in found]


def _drop_other_keywords(
    found: Sequence[tuple[Path, dict[str, Any]]], targets: Sequence[Path | None]
) -> None:
    """Drop keywords of no meaning, but those that hold a part that is referred to."""
    held = {target[:depth] for target in targets if target for depth in range(1, len(target))}
    for path, part in found:
        for keyword in [key for key in part if key not in _KEYWORDS and (*path, key) not in held]:
            del part[keyword]


def _rewrite_part(
    path: Path, part: dict[str, Any], is_loose: Callable[[Path], bool]
) -> tuple[list[str], dict[str, Any] | None]:
    """:func:`_rewritten` of the part at ``path``. Raises Unfit."""
    try:
        return _rewritten(part, strict=not is_loose(path))
    except Inexact as error:
        raise Unfit(str(error), path) from None
    except Unenforceable as error:
        raise Unfit(f"{error}: the keyword 'pattern' cannot be enforced", path) from None


def _has_other_names(part: dict[str, Any]) -> bool:
    return part.get("additionalProperties") is not False and not _NAMING.isdisjoint(part)


def _is_address(value: Any) -> bool:
    return isinstance(value, str) and not value.startswith("#")


def _rewritten(part: dict[str, Any], *, strict: bool) -> tuple[list[str], dict[str, Any] | None]:
    """Rewrite one schema but for its patterns. Returns those of its text, which are no longer in it, and its
    ``patternProperties``. Raises Inexact and Unenforceable."""
    for keyword in [key for key, is_idle in _WITHOUT_EFFECT.items() if key in part and is_idle(part)]:
        del part[keyword]
    for keyword in _COUNTS:
        count = part.get(keyword)
        if isinstance(count, float) and count.is_integer():
            part[keyword] = int(count)
    fit(part, strict=strict)
    return list(_patterns(part, strict=strict)), _names(part, strict=strict)


def _patterns(part: dict[str, Any], *, strict: bool) -> Iterator[str]:
    format = part.get("format")
    if isinstance(format, str) and format in _FORMATS:
        del part["format"]
        yield _FORMATS[format]
    if isinstance(part.get("pattern"), str):
        try:
            yield from enforceable(part.pop("pattern"))
        except Unenforceable:
            if strict:
                raise


def _names(part: dict[str, Any], *, strict: bool) -> dict[str, Any] | None:
    """Without a pattern that cannot be enforced, all names are allowed."""
    given = part.get("patternProperties")
    if not isinstance(given, dict):
        return None
    found: dict[str, Any] = {}
    for pattern, schema in given.items():
        try:
            first, *others = enforceable(pattern)
            if others:
                raise Unenforceable("look-ahead in the pattern of a name")
            found[first] = schema
        except Unenforceable:
            if strict:
                raise
            part["additionalProperties"] = True
    return found


def _write(part: dict[str, Any], patterns: list[str], names: dict[str, Any] | None) -> None:
    if patterns:
        part["pattern"] = patterns.pop()
    if patterns:
        join(part, *({"pattern": each} for each in patterns))
    if names is not None:
        part["patternProperties"] = names


def _choose(
    schema: Any, found: list[tuple[Path, dict[str, Any]]], closing: Closing, is_loose: Callable[[Path], bool]
) -> None:
    """Write ``anyOf`` for ``oneOf``."""
    exclusive = Exclusive(schema, closing)
    around: dict[int, list[dict[str, Any]]] = {}
    chosen = []
    for path, part in found:
        beside = around.get(id(part), [])
        joined = part.get("allOf")
        for each in joined if isinstance(joined, list) else ():
            around[id(each)] = [part, *beside]
        if isinstance(part.get("oneOf"), list):
            try:
                options = exclusive.alternatives(part, beside)
            except Overlap as error:
                if not is_loose(path):
                    raise Unfit(f"{error}: the keyword 'oneOf' cannot be enforced", path) from None
                options = part["oneOf"]
            chosen.append((part, options))
    for part, options in chosen:  # all are judged as the client wrote them
        items = list(part.items())
        if "anyOf" in part:
            del part["oneOf"]
            join(part, {"anyOf": options})
            continue
        part.clear()
        part.update(("anyOf", options) if key == "oneOf" else (key, value) for key, value in items)
