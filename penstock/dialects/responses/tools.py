"""Tools of a request: what the model sees of them, and what its calls become."""

from __future__ import annotations

from typing import Any, NamedTuple

from penstock.dialects.responses.request_schema import NamespacedTool, ResponseTool
from penstock.generation.grammars.call_grammar import InputGrammar
from penstock.generation.request.custom_tools import custom_function, parse_input_format
from penstock.generation.request.schemas import Function, Tool
from penstock.generation.request.tool_choice import ToolChoice
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


class CallItemTool(NamedTuple):
    """What an item of a call says of its tool."""

    name: str
    namespace: str | None = None
    input: InputGrammar | None = None
    """Grammar of a custom tool's input."""


class Tools:
    """The tools of a request."""

    def __init__(self, tools: list[ResponseTool] | None) -> None:
        """Raises ApiError."""
        self.functions: list[Tool] | None = None if tools is None else []
        """As the model sees them."""
        self.called: dict[str, CallItemTool] = {}
        """Tools by function name, those whose calls are no plain function calls."""
        self.dropped: dict[str, None] = {}
        """Types of hosted tools that the model does not see."""
        self._fields: dict[str, str] = {}
        """Paths of parameters in the request, by those that chat completions would have."""
        for number, tool in enumerate(tools or ()):
            field = f"tools[{number}]"
            if tool.type != "namespace":
                self._add(tool, None, field)
                continue
            namespace = _name(tool, field)
            for place, inner in enumerate(tool.tools or ()):
                self._add(inner, namespace, f"{field}.tools[{place}]")

    def _add(self, tool: NamespacedTool, namespace: str | None, field: str) -> None:
        assert self.functions is not None
        if tool.type in HOSTED:
            self.dropped[tool.type] = None
            return
        if tool.type not in ("function", "custom"):
            param = f"{field}.type"
            raise ApiError(
                400,
                f"{param} must be function, custom or namespace, got {shown(tool.type)!r}.",
                param=param,
            )
        own = _name(tool, field)
        name, input = function_name(namespace, own), None
        if tool.type == "custom":
            input = parse_input_format(tool.format, f"{field}.format")
            function = custom_function(name, tool.description, input)
        else:
            function = Function(
                name=name, description=tool.description, parameters=tool.parameters, strict=tool.strict
            )
        self._fields[f"tools[{len(self.functions)}].function.parameters"] = f"{field}.parameters"
        self.functions.append(Tool(function=function))
        if input is not None or namespace is not None:
            self.called[name] = CallItemTool(own, namespace, input)

    @property
    def warning(self) -> str | None:
        """What the client should know of them."""
        if not self.dropped:
            return None
        return f"tools: this server runs no hosted tools, the model does not see {', '.join(self.dropped)}"

    def inputs(self) -> dict[str, InputGrammar]:
        """Inputs of custom tools by function name."""
        return {name: tool.input for name, tool in self.called.items() if tool.input is not None}

    def named_here(self, choice: ToolChoice) -> ToolChoice:
        """The choice, with the paths that errors of its grammar are to name."""
        constraint = choice.constraint
        if constraint is None:
            return choice
        parts = [each._replace(field=self._fields.get(each.field, each.field)) for each in constraint.parts]
        field = self._fields.get(constraint.field, constraint.field)
        return choice._replace(constraint=constraint._replace(field=field, parts=tuple(parts)))


def function_name(namespace: str | None, name: str) -> str:
    """The name by which the model knows a tool of a namespace."""
    return name if namespace is None else f"{namespace}__{name}"


def _name(tool: NamespacedTool, field: str) -> str:
    if not tool.name:
        shape = f'{{"type": "{tool.type}", "name": …}}'  # chat completions nest it
        message = f"{field}.name is missing: here a tool is written {shape}."
        raise ApiError(400, message, param=f"{field}.name")
    return tool.name


def chat_tool_choice(choice: str | dict[str, Any] | None, tools: Tools) -> str | dict[str, Any] | None:
    """The choice in the shape of chat completions, which nests names in ``function``. Raises ApiError."""
    if not isinstance(choice, dict):
        if choice == "required" and tools.dropped and not tools.functions:
            raise _hosted(next(iter(tools.dropped)), "tool_choice")
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
