"""Turns the messages of a request, which are lists of blocks, into the messages of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.dialects.messages.block_texts import BlockTexts, unsupported
from penstock.dialects.messages.compaction import BLOCK
from penstock.dialects.messages.request_schema import ContentBlock, CountTokensRequest, SystemBlock
from penstock.dialects.messages.thinking import thinking_text
from penstock.generation.compaction.compaction import summary_message
from penstock.generation.prompt.conversation import message_text
from penstock.generation.request.schemas import FunctionCall, Message, Part, ToolCall
from penstock.generation.request.unsupported_content import joined
from penstock.http.errors import ApiError, refused, shown

VOLATILE_HEADER = "x-anthropic-billing-header:"
"""Starts a system block that Claude Code changes from request to request: it is for Anthropic's billing, and
at the head of a prompt it would make every cached prefix useless."""
_ERRORS = ("error", "<tool_use_error>")
"""How results of failed tools start, in lower case, if they say so themselves."""


class _Summaries(Protocol):
    def text(self, block: ContentBlock, field: str) -> str: ...


def convert_messages(
    request: CountTokensRequest, texts: BlockTexts, summaries: _Summaries | None = None
) -> list[Message]:
    """The conversation, at least one message. ``summaries``: reads compaction blocks, which None refuses.
    Raises ApiError."""
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
            start = 0 if summaries is None else _after_compaction(message.content)
            if start and summaries is not None:  # it replaces all before it
                text = summaries.text(message.content[start - 1], f"{field}.content[{start - 1}]")
                messages = [summary_message(text)]
            if start < len(message.content) or not start:
                messages.append(_assistant(message.content, field, texts, start))
        elif message.role == "system":
            messages.append(Message("system", texts.joined(message.content, field)))
        else:
            messages += _user(message.content, field, texts)
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
            raise unsupported(block.type, f"system[{number}]")
    marked = [number for number, block in enumerate(system) if block.cache_control]
    stable = marked[-1] + 1 if marked else len(system)
    return _kept(system[:stable]), _kept(system[stable:])


def _kept(blocks: Sequence[SystemBlock]) -> list[str]:
    return [block.text for block in blocks if block.text and not block.text.startswith(VOLATILE_HEADER)]


def _user(blocks: list[ContentBlock], field: str, texts: BlockTexts) -> list[Message]:
    """A user's turn: results of tools become messages of their own."""
    messages: list[Message] = []
    said: list[str | Part] = []
    for number, block in enumerate(blocks):
        place = f"{field}.content[{number}]"
        if block.type == "tool_result":
            if said:
                messages.append(Message("user", joined(said)))
                said.clear()
            messages.append(Message("tool", _result(block, place, texts), tool_call_id=block.tool_use_id))
        else:
            said += texts.contents(block, place)
    if said or not messages:
        messages.append(Message("user", joined(said)))
    return messages


def _after_compaction(blocks: list[ContentBlock]) -> int:
    """The number of blocks until the last compaction with a summary, itself included; 0: there is none."""
    for number in range(len(blocks), 0, -1):
        block = blocks[number - 1]
        if block.type == BLOCK and block.content is not None:
            return number
    return 0


def _assistant(blocks: list[ContentBlock], field: str, texts: BlockTexts, start: int) -> Message:
    said: list[str | Part] = []
    calls: list[ToolCall] = []
    thoughts: list[str] = []
    for number in range(start, len(blocks)):
        block = blocks[number]
        if block.type == "thinking":
            thoughts.append(thinking_text(block.thinking or "", block.signature or ""))
        elif block.type == "redacted_thinking" or (block.type == BLOCK and block.content is None):
            continue  # only the server that made it can read it; a compaction that failed
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
            said += texts.contents(block, f"{field}.content[{number}]")
    thinking = "\n".join(filter(None, thoughts))
    return Message("assistant", joined(said), tool_calls=calls or None, reasoning=thinking or None)


def _result(block: ContentBlock, field: str, texts: BlockTexts) -> str | list[str | Part]:
    """What a tool has returned."""
    content: str | list[str | Part] = block.content if isinstance(block.content, str) else ""
    if isinstance(block.content, list):
        content = texts.joined(block.content, field)
    elif not isinstance(block.content, str | None):
        raise ApiError(
            400, f"{field}.content must be a string or a list of blocks.", param=f"{field}.content"
        )
    first = content if isinstance(content, str) else message_text(Message("tool", content[:1]))
    if block.is_error and not first.lstrip().lower().startswith(_ERRORS):
        return f"Error: {content}" if isinstance(content, str) else ["Error:", *content]
    return content
