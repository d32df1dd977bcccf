"""Counts the tokens of a request: what ``usage`` reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from penstock.generation.replies.reply import Choice


class RequestTimes(NamedTuple):
    """When a request's only stream was admitted and sent tokens: seconds of the monotonic clock."""

    queued: float
    """How long it waited for a slot."""
    admitted: float
    first_token: float
    last_token: float

    def metrics(self, tokens: int) -> dict[str, float]:
        """vLLM's field ``metrics`` of a reply of so many tokens, without what they are too few for."""
        prefill, decode = self.first_token - self.admitted, self.last_token - self.first_token
        shown = {
            "time_to_first_token_ms": prefill * 1e3,
            "generation_time_ms": decode * 1e3,
            "queue_time_ms": self.queued * 1e3,
        }
        if tokens > 1:
            shown["mean_itl_ms"] = decode * 1e3 / (tokens - 1)
        if prefill + decode > 0:
            shown["tokens_per_second"] = tokens / (prefill + decode)
        return {name: round(max(0.0, value), 3) for name, value in shown.items()}


class TokenUsage(NamedTuple):
    """Token counts of a request, or of one choice so far."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    """Prompt tokens found in the prefix cache; None: not reported."""
    reasoning_tokens: int | None = None
    """The part of the completion that is reasoning; None: reasoning is not parsed."""
    image_tokens: int = 0
    """The part of the prompt that stands for pictures."""
    times: RequestTimes | None = None
    """Of a request whose reply tells them."""

    def metrics(self) -> dict[str, float] | None:
        """The field ``metrics`` of a reply; None: it has none."""
        return None if self.times is None else self.times.metrics(self.completion_tokens)

    def plus(self, other: TokenUsage) -> TokenUsage:
        """The tokens of both."""
        return self._replace(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            cached_tokens=(self.cached_tokens or 0) + (other.cached_tokens or 0),
            image_tokens=self.image_tokens + other.image_tokens,
            reasoning_tokens=(self.reasoning_tokens or 0) + (other.reasoning_tokens or 0),
        )


def count_usage(choices: Sequence[Choice], cached_tokens: int) -> TokenUsage:
    """The usage of a request. A prompt counts once, whatever ``n`` is."""
    prompts = {id(choice.prompt): choice.prompt for choice in choices}.values()
    reasoning = [
        each for choice in choices if (each := choice.reasoning_tokens(choice.generated)) is not None
    ]
    return TokenUsage(
        sum(prompt.length for prompt in prompts),
        sum(choice.generated for choice in choices),
        cached_tokens,
        sum(reasoning) if reasoning else None,
        sum(prompt.image_tokens for prompt in prompts),
    )
