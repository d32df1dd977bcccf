"""Checks ``tools`` and ``tool_choice``: whether a reply may, must or must not call tools."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from penstock.generation.parsers.delta import OutputParser
from penstock.generation.parsers.json_calls import JsonCallsParser
from penstock.generation.parsers.named_call import NamedCallParser
from penstock.generation.request_schemas import Function, Tool
from penstock.generation.structured_output import ANY_OBJECT, Constraint, json_constraint
from penstock.http.errors import ApiError, not_served

MAX_TOOLS = 1024
"""Maximum ``tools``; OpenAI allows 128."""


class ToolChoice(NamedTuple):
    """Whether and how the model may call tools."""

    may_call: bool = False
    """Whether the model may write calls in its own format."""
    constraint: Constraint | None = None
    """Forces the output to be calls, in a format independent of the model."""
    parser: Callable[[], OutputParser] | None = None
    """Makes the parser of outputs under the constraint."""
    named: bool = False
    """Whether the request names the function; the finish reason is then ``stop``, as in OpenAI's API."""


def parse_tool_choice(
    tools: list[Tool] | None,
    choice: str | dict[str, Any] | None,
    *,
    one_call: bool,
    constrained: bool,
    known_format: bool,
) -> ToolChoice:
    """Raises ApiError for a choice that cannot be served.

    ``one_call``: at most one call per output. ``constrained``: the request has structured_outputs, which
    apply to all output (a response_format applies to content only). ``known_format``: whether the model's
    tool call format is known.
    """
    if choice is None:
        choice = "auto" if tools else "none"
    if tools and len(tools) > MAX_TOOLS:
        message = f"tools has {len(tools)} functions, at most {MAX_TOOLS} are allowed."
        raise ApiError(400, message, param="tools")
    if choice == "none":
        return ToolChoice()
    if not tools:
        raise _bad_choice("When using `tool_choice`, `tools` must be set.")
    for number, tool in enumerate(tools):
        if tool.type != "function":
            param = f"tools[{number}].type"
            raise ApiError(400, f"{param} must be function, got {tool.type[:60]!r}.", param=param)
    if isinstance(choice, dict):
        return _named(tools, choice, constrained=constrained)
    if choice == "required":
        return _required(tools, one_call=one_call, constrained=constrained)
    if choice != "auto":
        raise _bad_choice(f"tool_choice must be none, auto, required or a function, got {choice[:60]!r}.")
    if not known_format:
        raise not_served(
            "tool_choice",
            "auto (the default with tools) needs to know how the model writes calls, which neither its chat "
            "template nor --tool-call-parser says",
        )
    return ToolChoice(may_call=True)


def _named(tools: list[Tool], choice: dict[str, Any], *, constrained: bool) -> ToolChoice:
    """The whole output is the function's arguments."""
    wanted = choice.get("function")
    name = wanted.get("name") if isinstance(wanted, dict) else None
    for tool in tools:
        if tool.function.name == name:
            constraint = _constraint(_arguments(tool.function), constrained=constrained)
            return ToolChoice(False, constraint, partial(NamedCallParser, tool.function.name), named=True)
    raise _bad_choice("The tool specified in `tool_choice` does not match any of the specified `tools`")


def _required(tools: list[Tool], *, one_call: bool, constrained: bool) -> ToolChoice:
    """The whole output is a list of at least one call."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "parameters": _moved(_arguments(tool.function), number),
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for number, tool in enumerate(tools)
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if one_call:
        schema["maxItems"] = 1
    return ToolChoice(False, _constraint(schema, constrained=constrained), JsonCallsParser)


def _constraint(schema: dict[str, Any], *, constrained: bool) -> Constraint:
    if constrained:
        raise ApiError(
            400,
            "Only one constraint on the output is possible, got structured_outputs and tool_choice.",
            param="structured_outputs",
        )
    return json_constraint("tools", schema)


def _arguments(function: Function) -> dict[str, Any]:
    return ANY_OBJECT if function.parameters is None else function.parameters


def _moved(parameters: dict[str, Any], number: int) -> Any:
    """The parameters of tool ``number``, as part of the schema of a list of calls."""
    try:
        return _rebased(parameters, f"#/items/anyOf/{number}/properties/parameters")
    except RecursionError:
        param = f"tools[{number}].function.parameters"
        raise ApiError(400, f"{param} is nested too deeply.", param=param) from None


def _rebased(schema: Any, root: str) -> Any:
    """``schema`` for use at the path ``root`` of a larger schema: its references to ``#`` get that prefix."""
    if isinstance(schema, list):
        return [_rebased(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _rebased(value, root) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved


def _bad_choice(message: str) -> ApiError:
    return ApiError(400, f"{message} (parameter=tool_choice)", param="tool_choice")
