"""Token counts of one request as the model server reports them, in any of the dialects."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class UsageFields(msgspec.Struct, gc=False):
    """``usage`` in an event or a reply."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    # responses and messages
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None

    def merged_with(self, later: UsageFields) -> UsageFields:
        """These counts, updated with those that ``later`` has: messages report input first, output last, and
        each time all so far."""
        fields = UsageFields.__struct_fields__
        values = [getattr(later, name) for name in fields]
        return UsageFields(
            *(
                getattr(self, name) if value is None else value
                for name, value in zip(fields, values, strict=True)
            )
        )


@dataclass(slots=True, frozen=True)
class TokenUsage:
    """Tokens as counted by the model server; None: not reported."""

    input_tokens: int | None = None
    """All tokens of the prompt, in every API."""
    output_tokens: int | None = None
    cached_tokens: int | None = None
    """Those of the prompt that were in the server's cache."""


def read_usage(usage: UsageFields) -> TokenUsage:
    details = usage.prompt_tokens_details or usage.input_tokens_details
    cached = details.cached_tokens if details is not None else usage.cache_read_input_tokens
    input_tokens = usage.input_tokens
    if input_tokens is not None:  # messages exclude what was read from the cache, or written to it
        input_tokens += (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    return TokenUsage(
        usage.prompt_tokens if input_tokens is None else input_tokens,
        usage.completion_tokens if usage.output_tokens is None else usage.output_tokens,
        cached,
    )
