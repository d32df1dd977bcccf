"""Keeps the beginning of a conversation's prompt the same from turn to turn, so that its cached prefix is used.

The system text at the start of a conversation is the prompt's head. System text that comes later stays where
it is: as a system turn if the chat template writes one there, otherwise in the turn before it, between
``<system>`` and ``</system>``. It never becomes part of the head, where it would change all that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.generation.request.schemas import FunctionCall, Message, Part, ToolCall
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
    call = Message("assistant", "", tool_calls=[ToolCall(FunctionCall("f", {}), "123456789")])
    calling = [user, call, Message("tool", "T1", name="f", tool_call_id="123456789")]
    anywhere = all(
        _stays(render, [*before, later, *after], len(before))
        for before, after in (
            ([head, user], []),
            ([user], []),
            ([head, user], [Message("assistant", "A1"), Message("user", "U2")]),
            ([head, user, Message("assistant", "A1")], [Message("user", "U2")]),
        )
    )
    tools = _stays(render, calling, 2)
    if anywhere and tools:
        anywhere = _stays(render, [*calling, later], 3)
    return TurnRules(anywhere, not tools or _stays(render, [*calling, Message("user", "U2")], 3))


def _stays(render: Render, messages: list[Message], place: int) -> bool:
    """Whether the text of the message at ``place`` follows all that precedes it, which it does not change."""
    try:
        before, whole = render(messages[:place]), render(messages)
    except ApiError:
        return False
    text, last = messages[place].content, messages[place - 1].content
    assert isinstance(text, str)
    assert isinstance(last, str)
    end = before.rfind(last) + len(last) if last else 0
    return whole[:end] == before[:end] and whole.find(text, end) >= 0


def place_system_turns(messages: Sequence[Message], rules: TurnRules) -> list[Message]:
    """The messages with one system message at the most at their start, others where ``rules`` has them stay.

    Successive messages of a user become one: many templates want turns that alternate.
    """
    placed: list[Message] = []
    for message in messages:
        last = placed[-1] if placed else None
        if message.role in SYSTEM_ROLES:
            if last is None:
                placed.append(Message("system", message.content, name=message.name))
            elif last.role == "system":
                placed[-1] = _joined(last, _parts(message))
            elif rules.system_anywhere:
                placed.append(Message("system", message.content, name=message.name))
            else:
                _append_marked(placed, _parts(message))
        elif message.role == "user" and last is not None and _takes_user(last, message, rules):
            placed[-1] = _joined(last, _parts(message))
        else:
            placed.append(message)
    return placed


def _takes_user(last: Message, message: Message, rules: TurnRules) -> bool:
    """Whether a user's message becomes part of the one before it."""
    if last.role == "user":
        return last.name == message.name
    return last.role == "tool" and not rules.user_after_tool


def _append_marked(placed: list[Message], parts: list[str | Part]) -> None:
    marked: list[str | Part] = ["<system>", *parts, "</system>"]
    if placed[-1].role in ("user", "tool"):
        placed[-1] = _joined(placed[-1], marked)
    else:
        placed.append(Message("user", marked))


def _joined(message: Message, parts: list[str | Part]) -> Message:
    return Message(
        message.role,
        [*_parts(message), *parts],
        name=message.name,
        tool_call_id=message.tool_call_id,
    )


def _parts(message: Message) -> list[str | Part]:
    content = message.content
    return [] if content is None else [content] if isinstance(content, str) else content
