"""Writes the body of a chat completion in the form that chat servers of all makers take.

They differ in what they know besides OpenAI's fields, and some refuse what they do not know. Chat templates
differ in where they take system messages: at the head all do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.generation.media.source import ImageSource
from penstock.generation.prompt.conversation import message_text
from penstock.generation.prompt.template_rules import SYSTEM_ROLES
from penstock.generation.prompt.turns import marked
from penstock.generation.request.schemas import JsonObject, Message, Part, Tool, ToolCall
from penstock.generation.request.tool_choice import allowed_tools
from penstock.generation.request.unsupported_content import UnsupportedContent, images_follow, is_image
from penstock.http.errors import ApiError, encode_json

PlainMessage = dict[str, Any]
_NO_PARAMETERS = {"type": "object", "properties": {}}
_EFFORTS = {"xhigh": "high", "max": "high"}
"""Efforts that few servers know, and the next lower one."""


def chat_messages(messages: Sequence[Message], content: UnsupportedContent) -> list[PlainMessage]:
    """The messages of the body. Instructions at the head are one system message; later ones are marked text
    of the user; so are images, which results of chat completions cannot have. Raises ApiError."""
    head: list[str] = []
    plain: list[PlainMessage] = []
    for number, message in enumerate(images_follow(messages, ("user",))):
        if message.role in SYSTEM_ROLES:
            text = message_text(message, f"messages[{number}]")
            if plain:
                _add_user(plain, marked(text))
            else:
                head.append(text)
        elif message.role == "user":
            _add_user(plain, _content(message.content, content.images))
        elif message.role == "tool":
            text = message_text(message, f"messages[{number}]")
            plain.append({"role": "tool", "tool_call_id": message.tool_call_id or "", "content": text})
        else:
            plain.append(_assistant(message, f"messages[{number}]"))
    return [{"role": "system", "content": "\n\n".join(head)}, *plain] if head else plain


def _content(content: str | list[str | Part] | None, images: Sequence[ImageSource]) -> str | list[Any]:
    """Texts as one text, as some servers take no parts; with images, parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if all(isinstance(each, str) or each.type == "text" for each in content):
        return "\n".join(each if isinstance(each, str) else each.text or "" for each in content)
    return [_part(each, images) for each in content]


def _part(part: str | Part, images: Sequence[ImageSource]) -> dict[str, Any]:
    if isinstance(part, Part) and is_image(part):
        _, url, detail = images[part.image_url]
        return {
            "type": "image_url",
            "image_url": {"url": url} | ({} if detail == "auto" else {"detail": detail}),
        }
    return {"type": "text", "text": part if isinstance(part, str) else part.text or ""}


def _add_user(messages: list[PlainMessage], content: str | list[Any]) -> None:
    """Some chat templates refuse two messages of the user in a row."""
    if not messages or messages[-1]["role"] != "user":
        messages.append({"role": "user", "content": content})
        return
    before = messages[-1]["content"]
    if isinstance(before, str) and isinstance(content, str):
        messages[-1]["content"] = f"{before}\n\n{content}"
    else:
        messages[-1]["content"] = [*_as_parts(before), *_as_parts(content)]


def _as_parts(content: str | list[Any]) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _assistant(message: Message, field: str) -> PlainMessage:
    text = message_text(message, field)
    plain: PlainMessage = {"role": "assistant", "content": text}
    if message.tool_calls:
        plain["content"] = text or None
        plain["tool_calls"] = [_call(call) for call in message.tool_calls]
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        plain["reasoning_content"] = reasoning
    return plain


def _call(call: ToolCall) -> dict[str, Any]:
    assert call.function is not None, "both dialects make functions"
    given = call.function.arguments
    arguments = given if isinstance(given, str) else encode_json(given or {}).decode()
    function = {"name": call.function.name, "arguments": arguments.strip() or "{}"}
    return {"id": call.id or "", "type": "function", "function": function}


def tool_fields(
    tools: list[Tool] | None, choice: str | dict[str, Any] | None, *, one_call: bool
) -> dict[str, Any]:
    """The fields with the tools and their choice; of ``allowed_tools``, which few servers know, the server
    gets the allowed ones. Raises ApiError."""
    if not tools:
        if choice not in (None, "auto", "none"):
            raise ApiError(400, "tool_choice: there are no tools to choose from.", param="tool_choice")
        return {}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        numbered, choice = allowed_tools(list(enumerate(tools)), choice.get("allowed_tools"))
        tools = [tool for _, tool in numbered]
    fields: dict[str, Any] = {"tools": [_tool(tool) for tool in tools]}
    if choice is not None:
        fields["tool_choice"] = choice
    if one_call:
        fields["parallel_tool_calls"] = False
    return fields


def _tool(tool: Tool) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(tool)
    function = plain["function"]
    function["parameters"] = function.get("parameters") or _NO_PARAMETERS
    if not function.get("strict"):
        function.pop("strict", None)
    return plain


def schema_format(
    schema: JsonObject, *, name: str | None = None, description: str | None = None, strict: bool = True
) -> dict[str, Any]:
    """The field ``response_format`` for a JSON schema."""
    wanted: dict[str, Any] = {"name": name or "output", "schema": schema, "strict": strict}
    if description is not None:
        wanted["description"] = description
    return {"response_format": {"type": "json_schema", "json_schema": wanted}}


def effort_fields(effort: str | None) -> dict[str, Any]:
    """The field ``reasoning_effort``."""
    return {} if effort is None else {"reasoning_effort": _EFFORTS.get(effort, effort)}


def same_fields(request: msgspec.Struct, names: Sequence[str]) -> dict[str, Any]:
    """The fields that are the same in chat completions, those of the request that have a value."""
    values = ((name, getattr(request, name)) for name in names)
    return {name: value for name, value in values if value is not None}
