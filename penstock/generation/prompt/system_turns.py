"""Keeps the beginning of a conversation's prompt the same from turn to turn: its cached prefix is then used.

The system text at the start of a conversation is the prompt's head. System text that comes later stays where
it is: as a system turn if the chat template writes one there, otherwise in the turn before it, between
``<system>`` and ``</system>``. It never becomes part of the head, where it would change all that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from penstock.generation.request.schemas import FunctionCall, Message, ToolCall
from penstock.http.errors import ApiError

SYSTEM_ROLES = frozenset({"system", "developer"})

Render = Callable[[list[Message]], str]
"""Messages to a prompt without the start of the assistant's turn. Raises ApiError."""


class TurnRules(NamedTuple):
    """What a chat template does with turns; see :func:`turn_rules`."""

    system_anywhere: bool
    """Whether a system turn after others stays at its place."""
    user_after_tool: bool
    """Whether a user's turn may follow the result of a tool."""


def turn_rules(render: Render) -> TurnRules:
    """The rules of a chat template, found by rendering short conversations."""
    head, user, later = Message("system", "S1"), Message("user", "U1"), Message("system", "S2")
    answer, more = Message("assistant", "A1"), Message("user", "U2")
    call = Message("assistant", "", tool_calls=[ToolCall(FunctionCall("f", {}), "123456789")])
    result = [user, call, Message("tool", "T1", name="f", tool_call_id="123456789")]
    anywhere = all(
        _keeps_order(render, messages) and _stays(render, messages)
        for messages in (
            [user, later],
            [head, user, later, answer, more],
            [head, user, answer, later, more],
            *([[*result, later]] if _keeps_order(render, result) else []),
        )
    )
    after_tool = _keeps_order(render, [*result, more]) or not _keeps_order(render, result)
    return TurnRules(anywhere, after_tool)


def _keeps_order(render: Render, messages: list[Message]) -> bool:
    """Whether the texts of the messages are rendered one after the other."""
    try:
        prompt = render(messages)
    except ApiError:
        return False
    end = 0
    for message in messages:
        text = message_text(message)
        if text:
            end = prompt.find(text, end)
        if end < 0:
            return False
    return True


def _stays(render: Render, messages: list[Message]) -> bool:
    """Whether the message with the text S2 is known not to change what precedes it, up to the last text."""
    place = next(index for index, message in enumerate(messages) if message.content == "S2")
    try:
        before, whole = render(messages[:place]), render(messages)
    except ApiError:
        return False
    text = message_text(messages[place - 1])
    end = before.rfind(text) + len(text)
    return whole[:end] == before[:end]


def place_system_turns(messages: Sequence[Message], rules: TurnRules) -> list[Message]:
    """The messages with one system message at the most at their start, and others where ``rules`` has them
    stay.

    Successive messages of a user become one: many templates want turns that alternate. Contents become
    texts: templates differ in what they do with several parts.
    """
    placed: list[Message] = []
    added: list[list[str]] = []
    """Texts that belong to each message besides its own; they are joined once: there may be thousands."""
    for message in messages:
        last, text = placed[-1] if placed else None, message_text(message)
        if message.role in SYSTEM_ROLES:
            if last is None or (last.role != "system" and rules.system_anywhere):
                placed.append(Message("system", text))
            elif last.role == "system":
                added[-1].append(text)
            elif last.role in ("user", "tool"):
                added[-1].append(_marked(text))
            else:
                placed.append(Message("user", _marked(text)))
        elif message.role == "user" and last is not None and _takes_user(last, message, rules):
            added[-1].append(text)
        else:
            placed.append(message)
        if len(added) < len(placed):
            added.append([])
    return [
        replace(message, content="\n".join((message_text(message), *texts))) if texts else message
        for message, texts in zip(placed, added, strict=True)
    ]


def _takes_user(last: Message, message: Message, rules: TurnRules) -> bool:
    """Whether a user's message becomes part of the one before it."""
    if last.role == "user":
        return last.name == message.name
    return last.role == "tool" and not rules.user_after_tool


def _marked(text: str) -> str:
    return f"<system>\n{text}\n</system>"


def message_text(message: Message) -> str:
    """The text of a message, its parts joined by line breaks."""
    content = message.content
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join([part if isinstance(part, str) else part.value() or "" for part in content])
