"""Shortens conversations that exceed the context: ``truncation: auto``."""

from __future__ import annotations

from collections.abc import Callable

from penstock.generation.prompt.template_rules import SYSTEM_ROLES
from penstock.generation.request.schemas import Message


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
        if len(text.encode()) <= most:  # no token is shorter than a byte
            return text
        tokens = count(text)
        if tokens <= most or place + 1 >= len(starts):
            return text
        # Messages that have the surplus if all have as many tokens per character, markup included.
        surplus = (tokens - most) / tokens * sum(map(_length, kept))
        place += 1
        while place + 1 < len(starts):
            surplus -= sum(map(_length, messages[starts[place - 1] : starts[place]]))
            if surplus <= 0:
                break
            place += 1


def _length(message: Message) -> int:
    """Characters of a message, about."""
    parts = [message.content] if isinstance(message.content, str) else message.content or []
    texts = [part if isinstance(part, str) else part.value() or "" for part in parts]
    functions = [call.function for call in message.tool_calls or () if call.function is not None]
    calls = [f"{function.name}{function.arguments}" for function in functions]
    return sum(map(len, [*texts, *calls, message.reasoning_content or ""]))
