"""Counts the tokens of a request: what ``usage`` reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from penstock.generation.replies.reply import Choice


class TokenUsage(NamedTuple):
    """Token counts of a request, or of one choice so far."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    """Prompt tokens found in the prefix cache; None: not reported."""
    reasoning_tokens: int | None = None
    """The part of the completion that is reasoning; None: reasoning is not parsed."""


def count_usage(choices: Sequence[Choice], cached_tokens: int) -> TokenUsage:
    """The usage of a request. A prompt counts once, whatever ``n`` is."""
    prompts = {id(choice.prompt): choice.prompt.length for choice in choices}
    reasoning = [
        each for choice in choices if (each := choice.reasoning_tokens(choice.generated)) is not None
    ]
    return TokenUsage(
        sum(prompts.values()),
        sum(choice.generated for choice in choices),
        cached_tokens,
        sum(reasoning) if reasoning else None,
    )
