"""Tools of a request: functions, and custom tools, which are functions to the model."""

from __future__ import annotations

from penstock.dialects.chat.request_schema import ChatTool
from penstock.generation.grammars.call_grammar import InputGrammar
from penstock.generation.request.custom_tools import custom_function, parse_input_format
from penstock.generation.request.schemas import Function, Tool
from penstock.http.errors import ApiError


def parse_tools(tools: list[ChatTool] | None) -> tuple[list[Tool] | None, dict[str, InputGrammar]]:
    """The tools as the model sees them, and the inputs of custom ones by name. Raises ApiError."""
    inputs: dict[str, InputGrammar] = {}
    if tools is None:
        return None, inputs
    return [Tool(function=_function(tool, f"tools[{at}]", inputs)) for at, tool in enumerate(tools)], inputs


def _function(tool: ChatTool, field: str, inputs: dict[str, InputGrammar]) -> Function:
    if tool.type == "custom":
        if tool.custom is None:
            raise _nested(field, "custom")
        custom = tool.custom
        input = inputs[custom.name] = parse_input_format(custom.format, f"{field}.custom.format")
        return custom_function(custom.name, custom.description, input)
    if tool.type != "function":
        param = f"{field}.type"
        raise ApiError(400, f"{param} must be function or custom, got {tool.type[:60]!r}.", param=param)
    if tool.function is None:
        raise _nested(field, "function")
    return tool.function


def _nested(field: str, kind: str) -> ApiError:
    """For a tool as the Responses API has it, among others."""
    shape = f'{{"type": "{kind}", "{kind}": {{"name": …}}}}'
    return ApiError(
        400, f"{field}.{kind} is missing: here a tool is written {shape}.", param=f"{field}.{kind}"
    )
