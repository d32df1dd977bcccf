"""Converts a request's messages to the dictionaries that chat templates read."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.generation.body_decoder import check_parts
from penstock.generation.request_schemas import Message, Part, ToolCall
from penstock.http.errors import ApiError

_decode = msgspec.json.Decoder().decode


def conversation(messages: list[Message], *, parts: bool) -> list[dict[str, Any]]:
    """``messages`` as dictionaries.

    ``parts``: content becomes a list of ``{"type": "text", "text": …}``; otherwise one string, parts joined
    by line breaks as in vLLM. Raises ApiError for parts that are not text and for tool call arguments that
    are not a JSON object.
    """
    return [_message(message, number, parts) for number, message in enumerate(messages)]


def _message(message: Message, number: int, parts: bool) -> dict[str, Any]:
    content = message.refusal if message.content is None else message.content
    if message.function_call or message.audio:
        field = "function_call" if message.function_call else "audio"
        param = f"messages[{number}].{field}"
        raise ApiError(
            400, f"{param} is not supported; calls are sent as tool_calls, text as content.", param=param
        )
    if isinstance(content, list):
        texts = [_text(part, f"messages[{number}].content[{place}]") for place, part in enumerate(content)]
    else:
        texts = [] if content is None else [content]
    plain: dict[str, Any] = {"role": message.role}
    plain["content"] = [{"type": "text", "text": text} for text in texts] if parts else "\n".join(texts)
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_calls:
        plain["tool_calls"] = [
            _tool_call(call, f"messages[{number}].tool_calls[{place}]")
            for place, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if reasoning is not None:
        plain["reasoning"] = plain["reasoning_content"] = reasoning
    return plain


def _text(part: str | Part, where: str) -> str:
    if isinstance(part, str):
        return part
    if part.type != "text":
        raise ApiError(
            400, f"{where}: parts of type {part.type[:60]!r} are not supported, only text.", param=where
        )
    if part.text is None:
        raise ApiError(400, f"{where}: a part of type 'text' needs the field 'text'.", param=where)
    return part.text


def _tool_call(call: ToolCall, where: str) -> dict[str, Any]:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        # OpenAI's clients send arguments as text; templates expect an object.
        try:
            text = arguments.encode()
            check_parts(text, f"{where}.function.arguments", f"{where}.function.arguments")
            arguments = _decode(text) if arguments.strip() else {}
        except (msgspec.MsgspecError, RecursionError) as error:
            raise _bad_arguments(where, str(error)) from None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise _bad_arguments(where, f"got {type(arguments).__name__}")
    plain: dict[str, Any] = {"type": call.type}
    if call.id is not None:
        plain["id"] = call.id
    plain["function"] = {"name": call.function.name, "arguments": arguments}
    return plain


def _bad_arguments(where: str, why: str) -> ApiError:
    param = f"{where}.function.arguments"
    return ApiError(400, f"{param} must be the text of a JSON object: {why}.", param=param)
