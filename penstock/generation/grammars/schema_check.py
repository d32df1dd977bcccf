"""Validates a JSON schema for llguidance: names the part that is at fault, and drops what cannot be enforced.

llguidance names the fault but not its place. The place is found by validating the schema with parts of it
left out. Grammars are made with its option ``lenient``: it tells what it cannot enforce in warnings. An
unknown ``format`` is an annotation (JSON Schema 2020-12, validation, 7.2.1) and no fault.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from llguidance import LLMatcher

from penstock.engine.sampling.grammar_limits import in_words
from penstock.generation.grammars.equivalent_schema import Unfit, rewrite
from penstock.generation.grammars.schema_parts import Path, at, parts, put, referred
from penstock.generation.grammars.text_match import LIMITS
from penstock.generation.grammars.validation import ValidationResult

SEARCH_S = 1.0
"""CPU time to find the place of a fault; a part that contains it is named if that takes longer."""

_ROOT: Path = ("grammars", 0, "json_schema")
"""Where the schema is in the text of its grammar."""
_DEFINITIONS = frozenset(("$defs", "definitions"))
_UNKNOWN_FORMAT = "Unknown format: "
_PATTERN_FAULT = re.compile("regex|disjoint|lookaround", re.IGNORECASE)
"""Messages on patterns that llguidance cannot compile, or not together."""
MAX_DROPPED = 8
"""Parts of a schema that may lose their patterns."""
_KIND = 10
"""Characters that tell kinds of llguidance's faults apart."""
_UNSATISFIABLE = "Unsatisfiable"
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]", re.DOTALL)


def check_schema(grammar: str, loose: Sequence[Path]) -> ValidationResult:
    """Validate the grammar of a JSON schema, made with ``lenient``, and rewrite it for llguidance.

    ``loose``: parts of the schema that may have keywords and patterns that cannot be enforced; they are
    dropped. Elsewhere they are a problem. Raises llguidance's errors.
    """
    try:
        changed = _rewritten(grammar, loose, close=True)
        fault, warnings = _validated(changed)
        if fault.startswith(_UNSATISFIABLE):
            opened = _rewritten(grammar, loose, close=False)
            if not _validated(opened)[0]:
                changed, (fault, warnings) = opened, _validated(opened)
    except Unfit as unfit:
        return ValidationResult("", str(unfit), _as_given(grammar, unfit.path))
    for _ in range(MAX_DROPPED):
        if not fault:
            break
        search = _Search(json.loads(changed), _same_fault(fault), _impossible)
        if not any(search.path[: len(each)] == each for each in loose) or not _PATTERN_FAULT.search(fault):
            return ValidationResult("", _explained(search.problem), _as_given(grammar, search.path))
        document = json.loads(changed)
        _drop_patterns(at(document, _ROOT + search.path))
        changed = _text(document)
        fault, warnings = _validated(changed)
    if fault:
        return ValidationResult("", _explained(fault))
    if warnings and () not in loose:
        document = json.loads(changed)
        for path in loose:
            put(document, _ROOT + path, {})
        if any(_validated(_text(document))[1]):
            search = _Search(document, _first_problem, lambda _: {})
            return ValidationResult("", _explained(search.problem), _as_given(grammar, search.path))
    return ValidationResult("" if changed == grammar else changed)


def _rewritten(grammar: str, loose: Sequence[Path], *, close: bool) -> str:
    """Raises Unfit."""
    document = json.loads(grammar)
    rewrite(at(document, _ROOT), lambda path: any(path[: len(each)] == each for each in loose), close=close)
    return _text(document)


def _text(document: Any) -> str:
    return json.dumps(document, ensure_ascii=False)


def _as_given(grammar: str, path: Path) -> Path:
    """``path`` in the schema as the client wrote it."""
    value = at(json.loads(grammar), _ROOT)
    found: Path = ()
    for step in path:
        known = step
        if step == "anyOf" and isinstance(value, dict) and step not in value:
            known = "oneOf"
        try:
            value = value[known]
        except (LookupError, TypeError):
            break  # what is further inside stands only in the rewritten schema
        found += (known,)
    return found


def _validated(grammar: str) -> tuple[str, list[str]]:
    """The error, and what is not enforced."""
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
    if is_error:
        return messages[0].strip() or "it is not valid", []
    return "", [each for each in messages if not each.startswith(_UNKNOWN_FORMAT)]


def _same_fault(fault: str) -> Callable[[str], str]:
    """Say what is wrong with a grammar, if it is like ``fault``: leaving parts out makes other faults."""
    kind = fault[:_KIND]

    def problem_of(grammar: str) -> str:
        found = _validated(grammar)[0]
        return found if found.startswith(kind) else ""

    return problem_of


def _first_problem(grammar: str) -> str:
    fault, warnings = _validated(grammar)
    return fault or (warnings[0] if warnings else "")


def _explained(problem: str) -> str:
    """llguidance's message, in the words of JSON Schema where it speaks of its code."""
    match = _UNIMPLEMENTED.fullmatch(problem)
    if match is None:
        return in_words(problem)
    names = match[1].replace('"', "'")
    what = f"the keywords {names}" if "," in names else f"the keyword {names}"
    return f"{what} cannot be enforced"


def _impossible(part: Path) -> dict[str, Any]:
    """A schema without faults for the place of ``part``: an alternative that allows anything would make
    llguidance skip the others."""
    return {"const": part[1]} if part[0] == "anyOf" else {}


def _drop_patterns(schema: Any) -> None:
    """Remove the patterns of what ``schema`` says of one value."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        part.pop("pattern", None)
        if part.pop("patternProperties", None) is not None:
            part["additionalProperties"] = True
        for key in ("allOf", "anyOf"):
            joined = part.get(key)
            waiting += joined if isinstance(joined, list) else ()


# -- the place of a fault


class _OutOfTime(Exception):
    pass


class _Search:
    """Finds the innermost part of a schema that has a problem even without the parts inside it."""

    def __init__(
        self, document: Any, problem_of: Callable[[str], str], blank: Callable[[Path], dict[str, Any]]
    ) -> None:
        """``document``: the grammar, parsed; it is changed. ``problem_of``: says what is wrong with one.
        ``blank``: makes a schema without a problem for the place of a part."""
        self._document = document
        self._problem_of = problem_of
        self._blank = blank
        self._end = time.process_time() + SEARCH_S
        self._path = _ROOT
        self.problem = problem_of(json.dumps(document))
        self._followed: set[Path] = set()
        try:
            while self._descend():
                pass
        except _OutOfTime:
            pass

    @property
    def path(self) -> Path:
        return self._path[len(_ROOT) :]

    def _has_problem(self) -> bool:
        if time.process_time() > self._end:
            raise _OutOfTime
        problem = self._problem_of(json.dumps(self._document))
        self.problem = problem or self.problem
        return bool(problem)

    def _descend(self) -> bool:
        """Go one part further. False: the problem is of this part."""
        schema = at(self._document, self._path)
        if not isinstance(schema, dict):
            return False
        originals = {path: at(schema, path) for path in parts(schema) if path[0] not in _DEFINITIONS}

        def keep(paths: Sequence[Path]) -> None:
            for path, original in originals.items():
                put(schema, path, original if path in paths else self._blank(path))

        keep(())
        if self._has_problem():
            target = self._target(schema)
            if target is None or target in self._followed:
                return False
            self._followed.add(target)
            self._path = target
            return True
        rest = list(originals)
        while len(rest) > 1:
            half = rest[: len(rest) // 2]
            keep(half)
            rest = half if self._has_problem() else rest[len(half) :]
        keep(rest)
        if not rest or not self._has_problem():
            keep(list(originals))  # several parts exclude each other
            return False
        self._path += rest[0]
        return True

    def _target(self, schema: dict[str, Any]) -> Path | None:
        """The part that ``$ref`` refers to."""
        path = referred(at(self._document, _ROOT), schema.get("$ref"))
        return None if path is None else _ROOT + path
