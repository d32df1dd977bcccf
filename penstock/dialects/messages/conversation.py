"""Turns the messages of a request, which are lists of blocks, into the messages of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.dialects.messages.request_schema import (
    ContentBlock,
    ContentPart,
    CountTokensRequest,
    SystemBlock,
)
from penstock.dialects.messages.thinking import thinking_text
from penstock.generation.request.schemas import FunctionCall, Message, ToolCall
from penstock.http.errors import ApiError, refused, shown

VOLATILE_HEADER = "x-anthropic-billing-header:"
"""Starts a system block that Claude Code changes from request to request: it is for Anthropic's billing, and
at the head of a prompt it would make every cached prefix useless."""
_ERRORS = ("error", "<tool_use_error>")
"""How results of failed tools start, in lower case, if they say so themselves."""


def convert_messages(request: CountTokensRequest) -> list[Message]:
    """The conversation, at least one message. Raises ApiError."""
    if not request.messages:
        raise ApiError(400, "messages must have at least one message.", param="messages")
    messages: list[Message] = []
    for number, message in enumerate(request.messages):
        field = f"messages[{number}]"
        if message.role not in ("user", "assistant", "system"):
            raise refused(f"{field}.role must be user, assistant or system.", f"{field}.role", message.role)
        if isinstance(message.content, str):
            messages.append(Message(message.role, message.content))
        elif message.role == "assistant":
            messages.append(_assistant(message.content, field))
        elif message.role == "system":
            messages.append(Message("system", "\n".join(_texts(message.content, field))))
        else:
            messages += _user(message.content, field)
    head, volatile = _system_texts(request.system)
    if volatile:
        end = len(messages) - (messages[-1].role == "assistant")
        messages.insert(end, Message("system", "\n".join(volatile)))
    if head:
        messages.insert(0, Message("system", "\n".join(head)))
    return messages


def _system_texts(system: str | list[SystemBlock] | None) -> tuple[list[str], list[str]]:
    """The texts of the prompt's head, and the volatile ones, which would change it from turn to turn: those
    after the last block with cache_control, where there is one. Raises ApiError."""
    if not system:
        return [], []
    if isinstance(system, str):
        return [system], []
    for number, block in enumerate(system):
        if block.type != "text":
            raise _unsupported(block.type, f"system[{number}]")
    marked = [number for number, block in enumerate(system) if block.cache_control]
    stable = marked[-1] + 1 if marked else len(system)
    return _kept(system[:stable]), _kept(system[stable:])


def _kept(blocks: Sequence[SystemBlock]) -> list[str]:
    return [block.text for block in blocks if block.text and not block.text.startswith(VOLATILE_HEADER)]


def _user(blocks: list[ContentBlock], field: str) -> list[Message]:
    """A user's turn: results of tools become messages of their own."""
    messages: list[Message] = []
    texts: list[str] = []
    for number, block in enumerate(blocks):
        place = f"{field}.content[{number}]"
        if block.type == "tool_result":
            if texts:
                messages.append(Message("user", "\n".join(texts)))
                texts.clear()
            messages.append(Message("tool", _result(block, place), tool_call_id=block.tool_use_id))
        else:
            texts.append(_text(block, place))
    if texts or not messages:
        messages.append(Message("user", "\n".join(texts)))
    return messages


def _assistant(blocks: list[ContentBlock], field: str) -> Message:
    texts: list[str] = []
    calls: list[ToolCall] = []
    thoughts: list[str] = []
    for number, block in enumerate(blocks):
        if block.type == "thinking":
            thoughts.append(thinking_text(block.thinking or "", block.signature or ""))
        elif block.type == "redacted_thinking":
            continue  # only the server that made it can read it
        elif block.type == "tool_use":
            place = f"{field}.content[{number}]"
            if not block.name:
                raise ApiError(400, f"{place}.name is missing.", param=f"{place}.name")
            given = block.input if block.input is not None else {}
            if not isinstance(given, dict):
                message = f"{place}.input must be an object, got {shown(given)}."
                raise ApiError(400, message, param=f"{place}.input")
            calls.append(ToolCall(FunctionCall(block.name, given), block.id))
        else:
            texts.append(_text(block, f"{field}.content[{number}]"))
    thinking = "\n".join(filter(None, thoughts))
    return Message("assistant", "\n".join(texts), tool_calls=calls or None, reasoning=thinking or None)


def _result(block: ContentBlock, field: str) -> str:
    content = block.content
    if content is None:
        text = ""
    elif isinstance(content, str):
        text = content
    elif isinstance(content, list):
        text = "\n".join(_texts(content, field))
    else:
        raise ApiError(
            400, f"{field}.content must be a string or a list of blocks.", param=f"{field}.content"
        )
    if block.is_error and not text.lstrip().lower().startswith(_ERRORS):
        return f"Error: {text}"
    return text


def _texts(blocks: Sequence[ContentBlock | ContentPart], field: str) -> list[str]:
    return [_text(block, f"{field}.content[{number}]") for number, block in enumerate(blocks)]


def _text(block: ContentBlock | ContentPart, field: str) -> str:
    """The text of a block that is text, or can be written as text."""
    if block.type == "text":
        if block.text is None:
            raise ApiError(400, f"{field}.text is missing.", param=f"{field}.text")
        return block.text
    if block.type == "document":
        return _tagged("document", block.title, [*filter(None, (block.context,)), _document(block, field)])
    if block.type == "search_result":
        texts = _inner_texts(block.content, f"{field}.content")
        return _tagged("search_result", block.title, [shown_source(block.source), *texts])
    raise _unsupported(block.type, field)


def shown_source(source: Any) -> str:
    return f"Source: {source}" if isinstance(source, str) else ""


def _inner_texts(content: Any, field: str) -> list[str]:
    """The texts of blocks that may be text alone."""
    texts = []
    for number, part in enumerate(content if isinstance(content, list) else []):
        fields = part if isinstance(part, dict) else {}
        if isinstance(part, ContentPart):
            fields = {"type": part.type, "text": part.text}
        text = fields.get("text")
        if fields.get("type") != "text" or not isinstance(text, str):
            place = f"{field}[{number}]"
            raise ApiError(400, f"{place} must be a block of type 'text' with a text.", param=place)
        texts.append(text)
    return texts


def _document(block: ContentBlock | ContentPart, field: str) -> str:
    source = block.source if isinstance(block.source, dict) else {}
    kind = source.get("type")
    if kind == "text" and isinstance(source.get("data"), str):
        return str(source["data"])
    content = source.get("content") if kind == "content" else None
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_inner_texts(content, f"{field}.source.content"))
    raise ApiError(
        400,
        f"{field}.source: documents of type {shown(kind)!r} are not supported, only text and text content.",
        param=f"{field}.source",
    )


def _tagged(tag: str, title: str | None, texts: list[str]) -> str:
    named = f' title="{title}"' if title else ""
    return f"<{tag}{named}>\n" + "\n".join(filter(None, texts)) + f"\n</{tag}>"


def _unsupported(kind: str, field: str) -> ApiError:
    return ApiError(
        400,
        f"{field}: blocks of type {shown(kind)!r} are not supported by this server, which takes text only.",
        param=field,
    )
