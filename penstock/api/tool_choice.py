"""The fields ``tools`` and ``tool_choice``: whether a chat may, must or must not be answered by calls."""

from __future__ import annotations

from .errors import ApiError
from .types import ChatCompletionRequest
from .unsupported import not_served


def may_call(request: ChatCompletionRequest, *, known_format: bool) -> bool:
    """Whether the output may be tool calls. Raises ApiError for a choice that cannot be served.

    ``known_format``: whether it is known how the model writes calls.
    """
    choice = request.tool_choice
    if choice is None:
        choice = "auto" if request.tools else "none"
    if choice == "none":
        return False
    if not request.tools:
        raise _bad_choice("When using `tool_choice`, `tools` must be set.")
    for number, tool in enumerate(request.tools):
        if tool.type != "function":
            param = f"tools[{number}].type"
            raise ApiError(400, f"{param} must be function, got {tool.type[:60]!r}.", param=param)
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if name not in [tool.function.name for tool in request.tools]:
            raise _bad_choice(
                "The tool specified in `tool_choice` does not match any of the specified `tools`"
            )
        raise not_served("tool_choice", "with tools it must be none or auto")
    if choice == "required":
        raise not_served("tool_choice", "with tools it must be none or auto")
    if choice != "auto":
        raise _bad_choice(f"tool_choice must be none, auto, required or a function, got {choice[:60]!r}.")
    if not known_format:
        raise not_served(
            "tool_choice",
            "auto (the default with tools) needs to know how the model writes calls, which neither its chat "
            "template nor --tool-call-parser says",
        )
    return True


def _bad_choice(message: str) -> ApiError:
    return ApiError(400, f"{message} (parameter=tool_choice)", param="tool_choice")
