"""Structured output: response_format and structured_outputs of a request as one grammar for llguidance.

:mod:`penstock.generation.grammars.checker` validates it; an invalid one never reaches an engine.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.generation.grammars.call_grammar import preceded
from penstock.generation.grammars.schema_parts import Path
from penstock.generation.grammars.validation import GrammarKind
from penstock.generation.request.schemas import GenerateRequest, ResponseFormat, StructuredOutputs
from penstock.http.errors import ApiError, shown

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_BYTES = 1 << 20
"""Maximum size of a grammar's text; llguidance's own limits refuse most grammars above half of it."""
MAX_SHOWN = 300
"""Maximum characters of the reason in an error."""
JSON_WHITESPACE: dict[str, JsonCompileOptions] = {
    "compact": {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"},
    "flexible": {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"},
}
"""llguidance's options for each value of ``--json-whitespace``. Some models fill their output with whitespace
where they may, so even ``flexible`` has a bound."""
ANY_OBJECT: dict[str, Any] = {"type": "object"}


class SchemaPart(NamedTuple):
    """The request field that a part of a grammar's JSON schema comes from."""

    path: Path
    field: str
    function: str = ""
    """Name of the function whose parameters the part describes."""
    loose: bool = False
    """Whether keywords that cannot be enforced are dropped; otherwise they are an error."""


class Constraint(NamedTuple):
    """A grammar and the request field it comes from."""

    field: str
    grammar: str
    kind: GrammarKind = "llguidance"
    parts: tuple[SchemaPart, ...] = ()
    """Parts of a JSON schema."""
    reasoning: str = ""
    """The grammar of reasoning that may precede; empty: there is none."""
    optional: bool = False
    """Whether it is left out where engines apply no grammars."""

    @property
    def whole(self) -> str:
        """The grammar of all output."""
        return preceded(self.grammar, self.reasoning) if self.reasoning else self.grammar

    def within(self, field: str) -> Constraint:
        """The same constraint, of fields within another one."""
        parts = tuple(part._replace(field=f"{field}.{part.field}") for part in self.parts)
        return self._replace(field=f"{field}.{self.field}", parts=parts)

    def loose(self) -> tuple[Path, ...]:
        return tuple(part.path for part in self.parts if part.loose)

    def fault(self, reason: str, path: Path = ()) -> ApiError:
        """The error for the part of the schema at ``path``."""
        for part in self.parts:
            depth = len(part.path)
            if path[:depth] == part.path:
                field = part.field + "".join(
                    f"[{step}]" if isinstance(step, int) else f".{shown(step)}" for step in path[depth:]
                )
                if reason.endswith("cannot be enforced") and "structured_outputs" not in field.split("."):
                    reason += '; "strict": false drops it'
                return invalid_constraint(field, reason, part.function)
        return invalid_constraint(self.field, reason)


def parse_constraint(request: GenerateRequest, whitespace: str) -> Constraint | None:
    """The constraint of a request; None if its output is free. ``whitespace``: a key of JSON_WHITESPACE.
    Raises ApiError for several constraints and for values that have no grammar."""
    constraints = []
    if request.response_format is not None:
        constraints += _of_format(request.response_format, whitespace)
    if request.structured_outputs is not None:
        constraints += _of_outputs(request.structured_outputs, whitespace)
    if len(constraints) > 1:
        fields = " and ".join(constraint.field for constraint in constraints)
        raise ApiError(400, f"Only one constraint on the output is possible, got {fields}.", param=fields)
    return constraints[0] if constraints else None


def _of_format(wanted: ResponseFormat, whitespace: str) -> list[Constraint]:
    if wanted.type == "text":
        return []
    if wanted.type == "json_object":
        return [json_constraint("response_format", ANY_OBJECT, whitespace)]
    if wanted.type != "json_schema":
        raise ApiError(
            400,
            f"response_format.type must be text, json_object or json_schema, got {wanted.type[:60]!r}.",
            param="response_format",
        )
    given = wanted.json_schema
    if given is None or given.schema is None:
        raise ApiError(
            400,
            "response_format: the type 'json_schema' needs the field 'json_schema' with a 'schema'.",
            param="response_format",
        )
    part = SchemaPart((), "response_format.json_schema.schema", loose=given.strict is False)
    return [json_constraint(part.field, given.schema, whitespace, parts=(part,))]


def _of_outputs(wanted: StructuredOutputs, whitespace: str) -> list[Constraint]:
    found = []
    if wanted.json is not None:
        found.append(json_constraint("structured_outputs.json", _schema(wanted.json), whitespace, wanted))
    if wanted.json_object:
        found.append(json_constraint("structured_outputs.json_object", ANY_OBJECT, whitespace, wanted))
    if wanted.regex is not None:
        from llguidance import LLMatcher

        regex = _checked("structured_outputs.regex", wanted.regex)
        found.append(Constraint("structured_outputs.regex", LLMatcher.grammar_from_regex(regex)))
    if wanted.choice is not None:
        if not wanted.choice:
            raise invalid_constraint("structured_outputs.choice", "it must not be empty")
        from llguidance import grammar_from

        choices = _checked("structured_outputs.choice", json.dumps(wanted.choice))
        found.append(Constraint("structured_outputs.choice", grammar_from("choice", choices)))
    if wanted.grammar is not None:
        from llguidance.gbnf_to_lark import is_lark_syntax

        lark = is_lark_syntax(_checked("structured_outputs.grammar", wanted.grammar))
        kind: GrammarKind = "llguidance" if lark else "gbnf"
        found.append(Constraint("structured_outputs.grammar", wanted.grammar, kind))
    if wanted.structural_tag is not None:
        raise ApiError(
            400,
            "structured_outputs.structural_tag is not supported by this server; use grammar.",
            param="structured_outputs.structural_tag",
        )
    if not found:
        raise ApiError(
            400,
            "structured_outputs constrains nothing: give it one of json, json_object (true), regex, choice "
            "and grammar, or leave it out.",
            param="structured_outputs",
        )
    return found


def _checked(field: str, text: str) -> str:
    """``text``, which is to become a grammar. Raises ApiError if it is too large."""
    if len(text) > MAX_GRAMMAR_BYTES:
        raise invalid_constraint(field, too_large(len(text)))
    return text


def too_large(size: int) -> str:
    return f"it has {size} characters, at most {MAX_GRAMMAR_BYTES} are allowed"


def _schema(given: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    try:
        schema = json.loads(_checked("structured_outputs.json", given))
    except (ValueError, RecursionError) as error:
        raise invalid_constraint("structured_outputs.json", f"it is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise invalid_constraint("structured_outputs.json", "it must be an object, or the text of one")
    return schema


def json_constraint(
    field: str,
    schema: dict[str, Any],
    whitespace: str,
    wanted: StructuredOutputs | None = None,
    parts: tuple[SchemaPart, ...] = (),
) -> Constraint:
    """JSON that matches ``schema``. ``whitespace``: a key of JSON_WHITESPACE, for requests that do not say
    otherwise; ``wanted``: the request's options for whitespace and properties; ``parts``: the fields that the
    schema is from, by default ``field``. Raises ApiError for a schema that is nested too deeply."""
    options = JSON_WHITESPACE[whitespace]
    try:
        if wanted is not None:
            if wanted.disable_any_whitespace:
                options = {"whitespace_flexible": False}
            elif wanted.whitespace_pattern is not None:
                options = {"whitespace_pattern": _checked(field, wanted.whitespace_pattern)}
            if wanted.disable_additional_properties:
                schema = _closed(schema)
        parts = parts or (SchemaPart((), field),)
        given = schema.get("x-guidance", {})
        if not isinstance(given, dict):
            raise invalid_constraint(field, "x-guidance must be an object")
        # What is not enforced becomes a warning, which the checker judges.
        schema = {**schema, "x-guidance": {**options, **given, "lenient": True}}
        # llguidance would round the numbers.
        grammar = _checked(field, json.dumps({"grammars": [{"name": "json_schema", "json_schema": schema}]}))
        return Constraint(field, grammar, "json_schema", parts)
    except (RecursionError, ValueError) as error:
        raise invalid_constraint(field, str(error)) from None


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


def invalid_constraint(field: str, reason: str, function: str = "") -> ApiError:
    """The error for a constraint; its ``reason`` may repeat the whole grammar, so it is shortened.
    ``function``: the tool whose parameters are meant."""
    if len(reason) > MAX_SHOWN:
        reason = f"{reason[:MAX_SHOWN]}…"
    whose = f" (of the function {shown(function)!r})" if function else ""
    return ApiError(400, f"{field}{whose} is not valid: {reason}", param=field)
