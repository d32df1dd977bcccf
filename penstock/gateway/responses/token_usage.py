"""Token counts of one request as the model server reports them, in any of the dialects."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class UsageFields(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    # responses and messages
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None


@dataclass(slots=True, frozen=True)
class TokenUsage:
    """Tokens as counted by the model server; None: not reported."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None

    def merged_with(self, later: TokenUsage) -> TokenUsage:
        """These counts, updated with those that ``later`` has: messages report input first, output last."""
        return TokenUsage(
            self.input_tokens if later.input_tokens is None else later.input_tokens,
            self.output_tokens if later.output_tokens is None else later.output_tokens,
            self.cached_tokens if later.cached_tokens is None else later.cached_tokens,
        )


def read_usage(usage: UsageFields | None) -> TokenUsage | None:
    if usage is None:
        return None
    details = usage.prompt_tokens_details or usage.input_tokens_details
    cached = details.cached_tokens if details is not None else usage.cache_read_input_tokens
    return TokenUsage(
        usage.prompt_tokens if usage.input_tokens is None else usage.input_tokens,
        usage.completion_tokens if usage.output_tokens is None else usage.output_tokens,
        cached,
    )
