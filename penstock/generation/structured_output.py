"""Structured output: response_format and structured_outputs of a request as one grammar, and its validation.

Grammars are texts for llguidance. An invalid one is refused with 400 here and never reaches an engine;
validation needs no tokenizer or model library.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from llguidance import LLMatcher, LLParserLimits, grammar_from

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

from penstock.generation.request_schemas import GenerateRequest, ResponseFormat, StructuredOutputs
from penstock.http.errors import ApiError

KNOWN_GRAMMARS = 1024
"""Maximum number of validated grammars that are remembered."""
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""Whitespace between JSON tokens, bounded so that a model cannot fill its whole output with it."""
ANY_OBJECT: dict[str, Any] = {"type": "object"}

_LIMITS = LLParserLimits(verbose_errors=False)


class Constraint(NamedTuple):
    """A grammar and the request field it comes from."""

    field: str
    grammar: str


def parse_constraint(request: GenerateRequest) -> Constraint | None:
    """The constraint of a request; None if its output is free. Raises ApiError for several constraints and
    for values that have no grammar; :class:`GrammarChecker` validates the grammar."""
    constraints = []
    if request.response_format is not None:
        constraints += _of_format(request.response_format)
    if request.structured_outputs is not None:
        constraints += _of_outputs(request.structured_outputs)
    if len(constraints) > 1:
        fields = " and ".join(constraint.field for constraint in constraints)
        raise ApiError(400, f"Only one constraint on the output is possible, got {fields}.", param=fields)
    return constraints[0] if constraints else None


def _of_format(wanted: ResponseFormat) -> list[Constraint]:
    if wanted.type == "text":
        return []
    if wanted.type == "json_object":
        return [json_constraint("response_format", ANY_OBJECT)]
    if wanted.type != "json_schema":
        raise ApiError(
            400,
            f"response_format.type must be text, json_object or json_schema, got {wanted.type[:60]!r}.",
            param="response_format",
        )
    schema = None if wanted.json_schema is None else wanted.json_schema.schema
    if schema is None:
        raise ApiError(
            400,
            "response_format: the type 'json_schema' needs the field 'json_schema' with a 'schema'.",
            param="response_format",
        )
    return [json_constraint("response_format.json_schema", schema)]


def _of_outputs(wanted: StructuredOutputs) -> list[Constraint]:
    found = []
    if wanted.json is not None:
        found.append(json_constraint("structured_outputs.json", _schema(wanted.json), wanted))
    if wanted.json_object:
        found.append(json_constraint("structured_outputs.json_object", ANY_OBJECT, wanted))
    if wanted.regex is not None:
        found.append(Constraint("structured_outputs.regex", LLMatcher.grammar_from_regex(wanted.regex)))
    if wanted.choice is not None:
        if not wanted.choice:
            raise _invalid("structured_outputs.choice", "it must not be empty")
        found.append(
            Constraint("structured_outputs.choice", grammar_from("choice", json.dumps(wanted.choice)))
        )
    if wanted.grammar is not None:
        try:
            text = grammar_from("grammar", wanted.grammar)  # Lark, or GBNF
        except ValueError as error:
            raise _invalid("structured_outputs.grammar", str(error)) from None
        found.append(Constraint("structured_outputs.grammar", text))
    if wanted.structural_tag is not None:
        raise ApiError(
            400,
            "structured_outputs.structural_tag is not supported by this server; use grammar.",
            param="structured_outputs.structural_tag",
        )
    return found


def _schema(given: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    try:
        schema = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise _invalid("structured_outputs.json", f"it is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise _invalid("structured_outputs.json", "it must be an object, or the text of one")
    return schema


def json_constraint(
    field: str, schema: dict[str, Any], wanted: StructuredOutputs | None = None
) -> Constraint:
    """JSON that matches ``schema``; ``wanted``: options for whitespace and properties. Raises ApiError for a
    schema that is nested too deeply."""
    options: JsonCompileOptions = {"whitespace_pattern": WHITESPACE}
    try:
        if wanted is not None:
            if wanted.disable_any_whitespace:
                options = {"whitespace_flexible": False}
            elif wanted.whitespace_pattern is not None:
                options = {"whitespace_pattern": wanted.whitespace_pattern}
            if wanted.disable_additional_properties:
                schema = _closed(schema)
        return Constraint(field, LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=options))
    except (RecursionError, ValueError) as error:
        raise _invalid(field, str(error)) from None


def _closed(value: Any) -> Any:
    """The schema with ``additionalProperties: false`` in objects that name properties and do not set it."""
    if isinstance(value, list):
        return [_closed(item) for item in value]
    if not isinstance(value, dict):
        return value
    closed = {key: _closed(item) for key, item in value.items()}
    if "properties" in value or "patternProperties" in value:
        closed.setdefault("additionalProperties", False)
    return closed


def _invalid(field: str, reason: str) -> ApiError:
    return ApiError(400, f"{field} is not valid: {reason}", param=field)


class GrammarChecker:
    """Validates grammars in a thread: a large schema takes tens of milliseconds."""

    def __init__(self) -> None:
        self._valid: dict[str, None] = {}

    async def check(self, constraint: Constraint) -> None:
        """Raises ApiError with the field and the reason if the grammar is invalid."""
        grammar = constraint.grammar
        if grammar in self._valid:
            return
        reason = await asyncio.to_thread(LLMatcher.validate_grammar, grammar, limits=_LIMITS)
        if reason:
            raise _invalid(constraint.field, reason.strip())
        if len(self._valid) >= KNOWN_GRAMMARS:
            del self._valid[next(iter(self._valid))]
        self._valid[grammar] = None
