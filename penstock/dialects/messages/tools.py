"""Tools of a request: custom ones, and Anthropic's client tools, whose schemas requests leave out."""

from __future__ import annotations

from typing import Any

from penstock.dialects.messages.request_schema import MessagesTool, MessagesToolChoice
from penstock.generation.request.schemas import Function, Tool
from penstock.http.errors import ApiError, refused, shown

_STRING = {"type": "string"}
_INTEGER = {"type": "integer"}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


_RANGE = {"type": "array", "items": _INTEGER, "minItems": 2, "maxItems": 2}
_EDITOR = "View, create and edit text files."
_CLIENT_TOOLS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bash": (
        "bash",
        "Run a command in a persistent bash session.",
        _object([], command=_STRING, restart={"type": "boolean"}),
    ),
    "text_editor": (
        "str_replace_based_edit_tool",
        _EDITOR,
        _object(
            ["command", "path"],
            command={"type": "string", "enum": ["view", "create", "str_replace", "insert", "undo_edit"]},
            path=_STRING,
            file_text=_STRING,
            old_str=_STRING,
            new_str=_STRING,
            insert_line=_INTEGER,
            insert_text=_STRING,
            view_range=_RANGE,
        ),
    ),
    "memory": (
        "memory",
        "Store and retrieve information across conversations in files below /memories.",
        _object(
            ["command"],
            command={
                "type": "string",
                "enum": ["view", "create", "str_replace", "insert", "delete", "rename"],
            },
            path=_STRING,
            old_path=_STRING,
            new_path=_STRING,
            file_text=_STRING,
            old_str=_STRING,
            new_str=_STRING,
            insert_line=_INTEGER,
            insert_text=_STRING,
            view_range=_RANGE,
        ),
    ),
}
"""Built-in tools by the type without its date: name, description and schema of the input."""


def convert_tools(tools: list[MessagesTool] | None) -> list[Tool] | None:
    """The tools as functions. Raises ApiError for tools that a server would have to run."""
    if tools is None:
        return None
    return [_convert(tool, f"tools[{number}]") for number, tool in enumerate(tools)]


def _convert(tool: MessagesTool, field: str) -> Tool:
    if tool.type in (None, "custom"):
        if not tool.name:
            raise ApiError(400, f"{field}.name is missing.", param=f"{field}.name")
        if tool.input_schema is None:
            raise ApiError(400, f"{field}.input_schema is missing.", param=f"{field}.input_schema")
        function = Function(
            name=tool.name,
            description=tool.description,
            parameters=tool.input_schema,
            strict=tool.strict,
        )
        return Tool(function=function)
    kind, _, date = (tool.type or "").rpartition("_")
    known = _CLIENT_TOOLS.get(kind) if date.isdigit() else None
    if known is None:
        raise ApiError(
            400,
            f"{field}.type: tools of type {shown(tool.type)!r} are not supported by this server, only "
            "custom, bash_…, text_editor_… and memory_….",
            param=f"{field}.type",
        )
    name, description, schema = known
    return Tool(function=Function(name=tool.name or name, description=description, parameters=schema))


def convert_choice(choice: MessagesToolChoice | None) -> str | dict[str, Any] | None:
    """The choice in the spelling of chat completions. Raises ApiError."""
    if choice is None:
        return None
    if choice.type == "tool":
        if not choice.name:
            raise ApiError(400, "tool_choice.name is missing.", param="tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}
    spelled = {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)
    if spelled is None:
        raise refused("tool_choice.type must be auto, any, tool or none.", "tool_choice.type", choice.type)
    return spelled
