"""Converts a request's messages to the dictionaries that chat templates read."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import msgspec

from penstock.generation.parsers.custom_input import CUSTOM_INPUT
from penstock.generation.request.body_decoder import check_parts
from penstock.generation.request.schemas import Message, Part, ToolCall
from penstock.http.errors import ApiError

_SHORT_ID = 9

_decode = msgspec.json.Decoder().decode


def conversation(
    messages: list[Message], *, parts: bool, wrap_arguments: bool = False
) -> list[dict[str, Any]]:
    """``messages`` as dictionaries.

    ``parts``: content becomes a list of ``{"type": "text", "text": …}``; otherwise one string, parts joined
    by line breaks as in vLLM. ``wrap_arguments``: tool call arguments that are not a JSON object become one
    with the field ``arguments``; otherwise the template gets their text as it is. Raises ApiError for parts
    that are not text.
    """
    return [_message(message, number, parts, wrap_arguments) for number, message in enumerate(messages)]


def has_text_arguments(messages: list[dict[str, Any]]) -> bool:
    """Whether a tool call of a conversation has a text for arguments: a model wrote no JSON object."""
    return any(
        isinstance(call["function"]["arguments"], str)
        for message in messages
        for call in message.get("tool_calls", ())
    )


def shorten_call_ids(messages: list[dict[str, Any]]) -> bool:
    """Replace the ids of calls by others of nine characters, as templates of Mistral's models want them.
    False: all have nine."""
    replaced = False
    for message in messages:
        calls = [(call, "id") for call in message.get("tool_calls", ())]
        for owner, field in [(message, "tool_call_id"), *calls]:
            id = owner.get(field)
            if id is not None and len(id) != _SHORT_ID:
                owner[field] = blake2b(id.encode(), digest_size=_SHORT_ID).hexdigest()[:_SHORT_ID]
                replaced = True
    return replaced


def _message(message: Message, number: int, parts: bool, wrap_arguments: bool) -> dict[str, Any]:
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
            _tool_call(call, f"messages[{number}].tool_calls[{place}]", wrap_arguments)
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
    if part.type not in ("text", "refusal"):
        raise ApiError(
            400,
            f"{where}: parts of type {part.type[:60]!r} are not supported, only text and refusal.",
            param=where,
        )
    text = part.value()
    if text is None:
        raise ApiError(
            400, f"{where}: a part of type {part.type!r} needs the field {part.type!r}.", param=where
        )
    return text


def _tool_call(call: ToolCall, field: str, wrap: bool) -> dict[str, Any]:
    """``field``: the path of the call in the request. A custom tool is a function to the model."""
    arguments: Any
    if call.custom is not None:
        name, arguments = call.custom.name, {CUSTOM_INPUT: call.custom.input}
    elif call.function is not None:
        name, given = call.function.name, call.function.arguments
        arguments = (
            _arguments(given, f"{field}.function.arguments") if isinstance(given, str) else given or {}
        )
    else:
        raise ApiError(400, f"{field}.function is missing.", param=f"{field}.function")
    if wrap and isinstance(arguments, str):
        arguments = {"arguments": arguments}
    plain: dict[str, Any] = {"type": "function"}
    if call.id is not None:
        plain["id"] = call.id
    plain["function"] = {"name": name, "arguments": arguments}
    return plain


def _arguments(text: str, field: str) -> dict[str, Any] | str:
    """The JSON object that OpenAI's clients send as ``text`` and templates expect; ``text`` if it is none.

    A history has what models wrote, cut short by max_tokens for instance. The model sees its own text and
    can correct it; an error would make the history useless for ever.
    """
    if not text.strip():
        return {}
    encoded = text.encode()
    check_parts(encoded, field, field)
    try:
        arguments = _decode(encoded)
    except (msgspec.MsgspecError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text
