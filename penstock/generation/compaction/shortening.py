"""Shortens conversations that exceed the context."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from penstock.generation.prompt.template_rules import SYSTEM_ROLES
from penstock.generation.request.schemas import Message

LEFT_OUT = "[The result of this tool is left out: the conversation is too long.]"
MARGIN = 1.05
"""How much more is left out than seems needed: messages differ in tokens per character."""


def shortened(
    messages: Sequence[Message],
    render: Callable[[list[Message]], str],
    count: Callable[..., int],
    most: int,
) -> str:
    """The prompt of the conversation in ``most`` tokens: without the oldest results of tools, as many as
    needed, and if that is not enough without its oldest messages. ``count``: tokens of a text, or more than
    its argument ``most``."""
    kept = list(messages)
    text = render(kept)
    tokens = count(text, most=most)
    if tokens <= most:
        return text
    surplus = (tokens - most) / tokens * sum(map(length, kept)) * MARGIN
    for place, message in enumerate(kept):
        spared = length(message) - len(LEFT_OUT)
        if surplus > 0 and message.role == "tool" and spared > 0:
            kept[place] = msgspec.structs.replace(message, content=LEFT_OUT)
            surplus -= spared
    return truncated(kept, render, lambda text: count(text, most=most), most)


def truncated(
    messages: list[Message], render: Callable[[list[Message]], str], count: Callable[[str], int], most: int
) -> str:
    """The prompt of the conversation without its oldest messages, as many as needed for ``most`` tokens.

    Instructions at the start and the last message stay, and no result of a tool loses its call. If that is
    still too long, so is the prompt.
    """
    head = next(
        (number for number, each in enumerate(messages) if each.role not in SYSTEM_ROLES), len(messages)
    )
    starts = [number for number in range(head, len(messages)) if messages[number].role != "tool"]
    place = 0
    while True:
        kept = messages if place == 0 else [*messages[:head], *messages[starts[place] :]]
        text = render(kept)
        tokens = count(text)
        if tokens <= most or place + 1 >= len(starts):
            return text
        # Messages that have the surplus if all have as many tokens per character, markup included.
        surplus = (tokens - most) / tokens * sum(map(length, kept))
        place += 1
        while place + 1 < len(starts):
            surplus -= sum(map(length, messages[starts[place - 1] : starts[place]]))
            if surplus <= 0:
                break
            place += 1


def length(message: Message, of_picture: int = 0) -> int:
    """Characters of a message, about. ``of_picture``: as how many a picture counts."""
    parts = [message.content] if isinstance(message.content, str) else message.content or []
    texts = [part if isinstance(part, str) else part.value() or "" for part in parts]
    functions = [call.function for call in message.tool_calls or () if call.function is not None]
    calls = [f"{function.name}{function.arguments}" for function in functions]
    pictures = sum(not isinstance(part, str) and part.type == "image" for part in parts)
    return pictures * of_picture + sum(map(len, [*texts, *calls, message.reasoning_content or ""]))
