"""Checks ``tools`` and ``tool_choice``: whether a reply may, must or must not call tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from penstock.generation.grammars.call_grammar import (
    CalledTool,
    InputGrammar,
    TokenIds,
    call_grammar,
    forced_grammar,
)
from penstock.generation.grammars.lark_in_json import NotEmbeddable
from penstock.generation.grammars.schema_parts import Path
from penstock.generation.parsers.call_syntax import Section
from penstock.generation.parsers.calls import RequiredCallsParser
from penstock.generation.parsers.delta import OutputParser
from penstock.generation.parsers.message import MessageFormat
from penstock.generation.parsers.named_call import NamedCallParser
from penstock.generation.parsers.registry import OutputFormat
from penstock.generation.parsers.value_types import Parameters
from penstock.generation.request.schemas import Function, Tool
from penstock.generation.request.structured_output import (
    ANY_OBJECT,
    JSON_WHITESPACE,
    Constraint,
    SchemaPart,
    invalid_constraint,
    json_constraint,
)
from penstock.http.errors import ApiError, shown

NO_FORMAT = (
    "tools: this model's chat template has no format of tool calls, so the answer is text; tool_choice "
    "required or a function works with any model (see --tool-call-parser)"
)
"""The warning where ``auto`` cannot call tools."""
NO_GRAMMAR = (
    "tools: no grammar can be applied to calls in this model's format, so strict schemas and the grammars of "
    "custom tools are not enforced unless tool_choice is required or names the tool"
)
"""The warning where ``auto`` is to enforce what it cannot."""
MAX_TOOLS = 1024
"""Maximum ``tools``; OpenAI allows 128."""
MAX_NAMED = 5
"""Maximum functions that an error lists."""


class ToolChoice(NamedTuple):
    """Whether and how the model may call tools."""

    tools: list[Tool] | None = None
    """The tools that the chat template shows."""
    may_call: bool = False
    """Whether the model may write calls in its own format."""
    constraint: Constraint | None = None
    """Forces the output to be calls, in a format independent of the model. If the model ``may_call``, it
    holds for calls in the model's format, and leaves all other text free."""
    parser: Callable[[], OutputParser] | None = None
    """Makes the parser of outputs under the constraint."""
    named: bool = False
    """Whether the request names the function; the finish reason is then ``stop``, as in OpenAI's API."""
    warning: str | None = None
    """What the client should know about the answer."""
    custom: frozenset[str] = frozenset()
    """Names of functions that are custom tools."""


class CallSyntax(NamedTuple):
    """How the model writes calls, for grammars."""

    section: Section
    ids: TokenIds


Inputs = Mapping[str, InputGrammar]
"""Inputs of custom tools by function name."""
NO_INPUTS: Inputs = MappingProxyType({})
T = TypeVar("T")


def message_format(
    choice: ToolChoice,
    known: OutputFormat,
    prompt: str,
    *,
    show_reasoning: bool = True,
    one_call: bool = False,
) -> MessageFormat | None:
    """Which parsers an output needs; None if it is all content.

    ``known``: the model's format; ``prompt``: the text before the output. The others: see MessageFormat.
    """
    parameters = Parameters({tool.function.name: tool.function.parameters for tool in choice.tools or ()})
    tools = known.call_parser(parameters) if choice.may_call else choice.parser
    reasoning = known.reasoning_parser(prompt, calls=choice.may_call, parameters=parameters)
    if tools is None and reasoning is None:
        return None
    tags = known.reasoning.tags if known.reasoning else ()
    return MessageFormat(reasoning, tools, show_reasoning, one_call, choice.named, choice.custom, tags)


Numbered = list[tuple[int, Tool]]
"""Tools with their index in the request."""


def parse_tool_choice(
    tools: list[Tool] | None,
    choice: str | dict[str, Any] | None,
    *,
    one_call: bool,
    constrained: bool,
    known_format: bool,
    whitespace: str,
    syntax: CallSyntax | None = None,
    inputs: Inputs = NO_INPUTS,
) -> ToolChoice:
    """Raises ApiError for a choice that cannot be served.

    ``one_call``: at most one call per output. ``constrained``: the request has structured_outputs, which
    apply to all output (a response_format applies to content only). ``known_format``: whether the model's
    tool call format is known, ``syntax``: how it is written, if grammars can say so. ``whitespace``: a key of
    JSON_WHITESPACE. ``inputs``: which functions are custom tools.
    """
    if choice is None or (choice == "auto" and tools == []):  # clients send the empty list of a chat's tools
        choice = "auto" if tools else "none"
    if tools:
        _check_count(tools)
    if choice == "none":
        return ToolChoice()  # a model that sees tools may write a call, which would be text
    if not tools:
        raise _bad_choice("When using `tool_choice`, `tools` must be set.")
    _check_types(tools)
    numbered = list(enumerate(tools))
    if isinstance(choice, dict):
        kind = choice.get("type", "function")
        if kind in ("function", "custom"):
            return _named(numbered, choice, constrained=constrained, whitespace=whitespace, inputs=inputs)
        if kind != "allowed_tools":
            raise _bad_choice(
                f"tool_choice.type must be function, custom or allowed_tools, got {shown(kind)!r}."
            )
        numbered, choice = allowed_tools(numbered, choice.get("allowed_tools"))
    allowed = [tool for _, tool in numbered]
    if choice == "required":
        constraint = _required(
            numbered, one_call=one_call, constrained=constrained, whitespace=whitespace, inputs=inputs
        )
        return ToolChoice(
            allowed, constraint=constraint, parser=RequiredCallsParser, custom=frozenset(inputs)
        )
    if choice != "auto":
        raise _bad_choice(
            f"tool_choice must be none, auto, required, a function or allowed_tools, got {shown(choice)!r}."
        )
    if not known_format:
        return ToolChoice(allowed, warning=NO_FORMAT)
    wanted = any(each.function.strict or _has_grammar(each.function, inputs) for each in allowed)
    if not wanted or constrained:
        return ToolChoice(allowed, may_call=True, custom=frozenset(inputs))
    grammar = None
    if syntax is not None:
        called = [_called_tool(tool.function, whitespace, inputs, lazy=True) for tool in allowed]
        grammar = _checked_grammar(
            lambda: call_grammar(syntax.section, called, syntax.ids, one_call=one_call)
        )
    return ToolChoice(
        allowed,
        may_call=True,
        constraint=None if grammar is None else Constraint("tools", grammar, optional=True),
        warning=NO_GRAMMAR if grammar is None else None,
        custom=frozenset(inputs),
    )


def _check_count(tools: Sequence[Tool]) -> None:
    if len(tools) > MAX_TOOLS:
        message = f"tools has {len(tools)} functions, at most {MAX_TOOLS} are allowed."
        raise ApiError(400, message, param="tools")


def _check_types(tools: Sequence[Tool]) -> None:
    for number, tool in enumerate(tools):
        if tool.type != "function":
            param = f"tools[{number}].type"
            raise ApiError(400, f"{param} must be function, got {tool.type[:60]!r}.", param=param)


def _has_grammar(function: Function, inputs: Inputs) -> bool:
    return function.name in inputs and inputs[function.name].syntax != "text"


def _called_tool(function: Function, whitespace: str, inputs: Inputs, *, lazy: bool) -> CalledTool:
    """``lazy``: in the model's own format, where only strict functions have a schema."""
    if function.name in inputs:
        return CalledTool(function.name, None, inputs[function.name])
    if lazy and not function.strict:
        return CalledTool(function.name, None)
    schema = _arguments(function)
    options = {**JSON_WHITESPACE[whitespace], "lenient": not function.strict}
    return CalledTool(function.name, {**schema, "x-guidance": options})


def _checked_grammar(make: Callable[[], T]) -> T:
    """What ``make`` returns. Raises ApiError for a tool whose grammar cannot be written."""
    try:
        return make()
    except NotEmbeddable as error:
        raise invalid_constraint("tools", str(error)) from None
    except RecursionError:
        raise invalid_constraint("tools", "they are nested too deeply") from None


def allowed_tools(tools: Numbered, allowed: Any) -> tuple[Numbered, str]:
    """The tools that ``allowed_tools`` lists, and its mode. Raises ApiError."""
    field = "tool_choice.allowed_tools"
    if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required"):
        raise _bad_choice(f"{field} must be an object with a mode, auto or required, and tools.")
    listed = allowed.get("tools")
    if not isinstance(listed, list) or not listed:
        raise _bad_choice(f"{field}.tools must be a list of at least one function.")
    known = {tool.function.name for _, tool in tools}
    names = set()
    for number, each in enumerate(listed):
        name = _function_name(each)
        if name not in known:
            raise _bad_choice(f"{field}.tools[{number}] does not match any of the specified `tools`.")
        names.add(name)
    return [each for each in tools if each[1].function.name in names], allowed["mode"]


def _function_name(reference: Any) -> str | None:
    """The name in ``{"type": "function", "function": {"name": …}}``, or the same with ``custom``."""
    kind = "custom" if isinstance(reference, dict) and reference.get("type") == "custom" else "function"
    function = reference.get(kind) if isinstance(reference, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _named(
    tools: Numbered, choice: dict[str, Any], *, constrained: bool, whitespace: str, inputs: Inputs
) -> ToolChoice:
    """The whole output is the function's arguments."""
    name = _function_name(choice)
    for number, tool in tools:
        if tool.function.name == name:
            part = _part((), number, tool.function)
            if _has_grammar(tool.function, inputs):
                constraint = _forced(
                    [(number, tool)], whitespace, inputs, named=True, one_call=True, constrained=constrained
                )
            else:
                constraint = _constraint(
                    part.field,
                    _arguments(tool.function),
                    (part,),
                    constrained=constrained,
                    whitespace=whitespace,
                )
            parser = partial(NamedCallParser, tool.function.name)
            allowed = [each for _, each in tools]
            return ToolChoice(
                allowed, constraint=constraint, parser=parser, named=True, custom=frozenset(inputs)
            )
    if name is None:
        raise _bad_choice("tool_choice.function.name is missing, the name of the function to call.")
    names = ", ".join(repr(shown(tool.function.name)) for _, tool in tools[:MAX_NAMED])
    more = f" and {len(tools) - MAX_NAMED} more" if len(tools) > MAX_NAMED else ""
    raise _bad_choice(
        f"The tool specified in `tool_choice`, {shown(name)!r}, does not match any of the specified `tools`: "
        f"{names}{more}."
    )


def _forced(
    tools: Numbered, whitespace: str, inputs: Inputs, *, named: bool, one_call: bool, constrained: bool
) -> Constraint:
    """The constraint of a named function or of ``required`` as a grammar, for tools that have one."""
    if constrained:
        raise _two_constraints()
    called = [_called_tool(tool.function, whitespace, inputs, lazy=False) for _, tool in tools]
    make = partial(forced_grammar, called, named=named, one_call=one_call)
    return Constraint("tools", _checked_grammar(make))


def _required(
    tools: Numbered, *, one_call: bool, constrained: bool, whitespace: str, inputs: Inputs
) -> Constraint:
    """The whole output is a list of at least one call."""
    if any(_has_grammar(tool.function, inputs) for _, tool in tools):
        return _forced(tools, whitespace, inputs, named=False, one_call=one_call, constrained=constrained)
    calls = []
    parts = []
    for place, (number, tool) in enumerate(tools):
        path = ("items", "anyOf", place, "properties", "parameters")
        parts.append(_part(path, number, tool.function))
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.function.name},
                    "parameters": _moved(_arguments(tool.function), path, parts[-1].field),
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if one_call:
        schema["maxItems"] = 1
    return _constraint("tools", schema, tuple(parts), constrained=constrained, whitespace=whitespace)


def _part(path: Path, number: int, function: Function) -> SchemaPart:
    field = f"tools[{number}].function.parameters"
    return SchemaPart(path, field, function.name, loose=function.strict is not True)


def _constraint(
    field: str, schema: dict[str, Any], parts: tuple[SchemaPart, ...], *, constrained: bool, whitespace: str
) -> Constraint:
    if constrained:
        raise _two_constraints()
    return json_constraint(field, schema, whitespace, parts=parts)


def _two_constraints() -> ApiError:
    return ApiError(
        400,
        "Only one constraint on the output is possible, got structured_outputs and tool_choice.",
        param="structured_outputs",
    )


def _arguments(function: Function) -> dict[str, Any]:
    return ANY_OBJECT if function.parameters is None else function.parameters


def _moved(parameters: dict[str, Any], path: Path, field: str) -> Any:
    """The parameters of a tool, ``field``, as the part at ``path`` of the schema of a list of calls."""
    # References start at the next schema with an $id: without it that is the list's.
    parameters = {key: value for key, value in parameters.items() if key != "$id"}
    try:
        return _rebased(parameters, "#/" + "/".join(map(str, path)))
    except RecursionError:
        raise ApiError(400, f"{field} is nested too deeply.", param=field) from None


def _rebased(schema: Any, root: str) -> Any:
    """``schema`` for use at the path ``root`` of a larger schema: its references to ``#`` get that prefix."""
    if isinstance(schema, list):
        return [_rebased(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _rebased(value, root) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):  # no anchor
        moved["$ref"] = root + reference[1:]
    return moved


def _bad_choice(message: str) -> ApiError:
    return ApiError(400, f"{message} (parameter=tool_choice)", param="tool_choice")
