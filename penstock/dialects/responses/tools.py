"""Tools of a request: what the model sees of them, and what its calls become."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from penstock.dialects.responses.request_schema import NamespacedTool, ResponseTool
from penstock.generation.grammars.call_grammar import InputGrammar
from penstock.generation.request.custom_tools import custom_function, parse_input_format
from penstock.generation.request.schemas import Function, Tool
from penstock.http.errors import ApiError, shown

HOSTED = (
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
)
"""Tools that OpenAI's servers run, or that its models alone know. Clients offer them without asking their
users, so that they are left out unless they are demanded."""


class CalledTool(NamedTuple):
    """What an item of a call says of its tool."""

    name: str
    namespace: str | None
    custom: bool
    input: InputGrammar | None = None
    """Of a custom tool."""


class Tools(NamedTuple):
    """The tools of a request."""

    functions: list[Tool] | None
    """As the model sees them."""
    called: dict[str, CalledTool]
    """By function name, those whose calls are no plain function calls."""
    dropped: tuple[str, ...]
    """Types of hosted tools that the model does not see."""


def function_name(namespace: str | None, name: str) -> str:
    """The name by which the model knows a tool of a namespace."""
    return name if namespace is None else f"{namespace}__{name}"


def parse_tools(tools: list[ResponseTool] | None) -> Tools:
    """Raises ApiError."""
    if tools is None:
        return Tools(None, {}, ())
    functions: list[Tool] = []
    called: dict[str, CalledTool] = {}
    dropped: list[str] = []
    for number, tool in enumerate(tools):
        field = f"tools[{number}]"
        if tool.type != "namespace":
            _add(tool, None, field, functions, called, dropped)
            continue
        namespace = _name(tool, field)
        for place, inner in enumerate(tool.tools or ()):
            _add(inner, namespace, f"{field}.tools[{place}]", functions, called, dropped)
    return Tools(functions, called, tuple(dict.fromkeys(dropped)))


def _add(
    tool: NamespacedTool,
    namespace: str | None,
    field: str,
    functions: list[Tool],
    called: dict[str, CalledTool],
    dropped: list[str],
) -> None:
    if tool.type in HOSTED:
        dropped.append(tool.type)
        return
    if tool.type not in ("function", "custom"):
        param = f"{field}.type"
        raise ApiError(
            400,
            f"{param} must be function, custom or namespace, got {shown(tool.type)!r}.",
            param=param,
        )
    own = _name(tool, field)
    name, custom = function_name(namespace, own), tool.type == "custom"
    input = parse_input_format(msgspec.to_builtins(tool.format), f"{field}.format") if custom else None
    if input is not None:
        function = custom_function(name, tool.description, input)
    else:
        function = Function(
            name=name, description=tool.description, parameters=tool.parameters, strict=tool.strict
        )
    functions.append(Tool(function=function))
    if custom or namespace is not None:
        called[name] = CalledTool(own, namespace, custom, input)


def _name(tool: NamespacedTool, field: str) -> str:
    if not tool.name:
        raise ApiError(400, f"{field}.name is missing, the name of the tool.", param=f"{field}.name")
    return tool.name


def chat_tool_choice(choice: str | dict[str, Any] | None, tools: Tools) -> str | dict[str, Any] | None:
    """The choice in the shape of chat completions, which nests names in ``function``. Raises ApiError."""
    if not isinstance(choice, dict):
        if choice == "required" and tools.dropped and not tools.functions:
            raise _hosted(tools.dropped[0], "tool_choice")
        return choice
    if choice.get("type") != "allowed_tools":
        return _reference(choice, "tool_choice")
    listed = choice.get("tools")
    if not isinstance(listed, list):
        raise ApiError(
            400, "tool_choice.tools must be a list of at least one tool.", param="tool_choice.tools"
        )
    references = [_reference(each, f"tool_choice.tools[{number}]") for number, each in enumerate(listed)]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": references}}


def _reference(reference: Any, field: str) -> dict[str, Any]:
    kind = reference.get("type") if isinstance(reference, dict) else None
    if kind in HOSTED:
        raise _hosted(kind, field)
    if kind not in ("function", "custom"):
        raise ApiError(
            400, f"{field}.type must be function, custom or allowed_tools, got {shown(kind)!r}.", param=field
        )
    name, namespace = reference.get("name"), reference.get("namespace")
    if not isinstance(name, str):
        raise ApiError(400, f"{field}.name is missing, the name of the tool.", param=field)
    return {"type": "function", "function": {"name": function_name(namespace, name)}}


def _hosted(kind: str, field: str) -> ApiError:
    return ApiError(
        400,
        f"{field}: this server runs no {kind} tool; it serves tools of the types function and custom.",
        param=field,
    )
