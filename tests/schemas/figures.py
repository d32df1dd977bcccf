"""Measures the grammars of others' schemas: ``python -m tests.schemas.figures`` prints the tables of
docs/structured-output.md."""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from functools import cache
from typing import Any, NamedTuple

from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from tests.schemas.corpora import store, suite
from tests.schemas.judge import Judge, Refused, admits, drawn, matcher, text_of

SEEDS = range(4)
_ANNOTATIONS = re.compile(
    r"optional/(content|format/(idn-hostname|idn-email|iri|iri-reference|uri-reference|uri-template|regex"
    r"|ecmascript-regex|json-pointer|relative-json-pointer))\.json"
)
"""Files of the test suite about what asserts nothing here; see the docs."""
_REASONS = (
    ("no instance matches the schema", r"Unsatisfiable"),
    ("a reference to another document, or to nothing", r"Resource|Pointer|registry|Invalid URI|Anchor '"),
    ("`oneOf` whose alternatives may overlap", r"may hold at once"),
    ("`pattern` with look-around or other syntax", r"keyword 'pattern'|regex"),
    ("`patternProperties` that overlap", r"not disjoint|are disjoint"),
    ("`if`, `then`, `else`", r"keywords? .*'(if|then|else)'|\"if\""),
    ("`unevaluatedProperties`, `unevaluatedItems`", r"keywords? .*'unevaluated"),
    ("`dependencies`, `dependentRequired`, `dependentSchemas`", r"keywords? .*'depend"),
    ("`contains`, `minContains`, `maxContains`", r"keywords? .*'(contains|m..Contains)'"),
    ("`$dynamicRef`, `$recursiveRef`", r"keywords? .*'\$(dynamic|recursive)"),
    *((f"`{keyword}`", f"keywords? .*'{keyword}'") for keyword in ("uniqueItems", "not", "propertyNames")),
    ("numbers beyond 64 bits, or of too many digits", r"the number "),
)


class Figures(NamedTuple):
    """What was measured of one collection."""

    counts: Counter[str]
    refused: Counter[str]
    """Schemas by the reason for which they are refused."""
    missed: Counter[str]
    """Valid instances that the grammar does not admit, by reason."""
    wrong: list[str]
    """Instances that the grammar admits and the schema forbids."""


def _figures() -> Figures:
    return Figures(Counter(), Counter(), Counter(), [])


def _reason(problem: str) -> str:
    return next(
        (reason for reason, sign in _REASONS if re.search(sign, problem)), "other limits of llguidance"
    )


@cache
def of_suite() -> Figures:
    """The test suite: each of its instances is held against the grammar."""
    found = _figures()
    with Judge() as judge:
        for case in suite():
            if _ANNOTATIONS.fullmatch(case.file):
                continue
            try:
                made = matcher(judge.grammar(case.schema))
            except Refused as refused:
                valid = any(valid for _, valid in case.instances)
                found.counts["refused" if valid else "without instances"] += 1
                found.refused[_reason(str(refused))] += valid
                continue
            found.counts["accepted"] += 1
            for value, valid in case.instances:
                text = text_of(value)
                admitted = admits(made, text)
                found.counts["instances"] += 1
                if admitted and not valid:
                    found.wrong.append(f"{case.draft}/{case.file}: {case.schema} admits {text}")
                if valid and not admitted:
                    found.missed[_missed(case.file, text)] += 1
    return found


def _missed(file: str, text: str) -> str:
    if "format" in file:
        return (
            "formats: IPv4 in IPv6, quoted email names, leap seconds away from UTC; all where they assert "
            "nothing"
        )
    if re.search(r"\d\.0\b|e\+|\d{17}", text):
        return "integers written as `1.0`, numbers beyond 64 bits"
    return "closed objects, order of properties" if "{" in text else "other"


@cache
def of_store() -> Figures:
    """SchemaStore: texts that are drawn from each grammar are held against the schema."""
    warnings.simplefilter("ignore")
    found = _figures()
    with Judge() as judge:
        for stored in store():
            found.counts["not strict"] += _is_accepted(judge, stored.schema)
            try:
                made = matcher(judge.grammar(stored.schema))
            except Refused as refused:
                found.counts["refused"] += 1
                found.refused[_reason(str(refused))] += 1
                continue
            found.counts["accepted"] += 1
            valid = validator_for(stored.exact, default=Draft202012Validator)(stored.exact)
            texts = [text for text in (drawn(made, seed) for seed in SEEDS) if text is not None]
            found.counts["instances"] += len(texts)
            found.wrong.extend(
                f"{stored.name} admits {text[:200]}" for text in texts if not _is_valid(valid, text)
            )
    return found


def _is_accepted(judge: Judge, schema: Any) -> bool:
    try:
        judge.grammar(schema, strict=False)
    except Refused:
        return False
    return True


def _is_valid(validator: Any, text: str) -> bool:
    return bool(validator.is_valid(json.loads(text, parse_float=Decimal)))


def tables() -> Iterator[str]:
    """Lines of the tables in docs/structured-output.md."""
    tried, stored = of_suite(), of_store()
    yield "| | JSON Schema Test Suite | SchemaStore |"
    yield "| --- | --- | --- |"
    for name, key in (
        ("schemas accepted", "accepted"),
        ("refused, with valid instances", "refused"),
        ("refused, without any", "without instances"),
        ("accepted where not strict", "not strict"),
        ("instances tried", "instances"),
    ):
        yield f"| {name} | {tried.counts[key] or '–'} | {stored.counts[key] or '–'} |"
    yield f"| **admitted wrongly** | **{len(tried.wrong)}** | **{len(stored.wrong)}** |"
    yield f"| valid and not admitted | {tried.missed.total()} | – |"
    yield ""
    yield "| refused for | JSON Schema Test Suite | SchemaStore |"
    yield "| --- | --- | --- |"
    both = tried.refused + stored.refused
    for reason, _ in both.most_common():
        yield f"| {reason} | {tried.refused[reason]} | {stored.refused[reason]} |"
    yield ""
    yield "| valid and not admitted | JSON Schema Test Suite |"
    yield "| --- | --- |"
    for reason, count in tried.missed.most_common():
        yield f"| {reason} | {count} |"


if __name__ == "__main__":
    print("\n".join(tables()))
