"""Token counts of one request as the model server reports them, in any of the dialects."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

MAX_TOKENS = 1 << 31
"""A larger count is none, of which a context of ten million tokens and 128 choices is far: counters are sums
of what servers report, and one wrong report would be the sum."""


class UsageFields(msgspec.Struct, gc=False):
    """``usage`` in an event or a reply. Some servers write whole numbers as floats."""

    prompt_tokens: Any = None
    completion_tokens: Any = None
    prompt_tokens_details: Any = None
    completion_tokens_details: Any = None
    # responses and messages
    input_tokens: Any = None
    output_tokens: Any = None
    input_tokens_details: Any = None
    output_tokens_details: Any = None
    cache_read_input_tokens: Any = None
    cache_creation_input_tokens: Any = None
    iterations: Any = None
    """Of messages: what compactions took is in these alone."""

    def merged_with(self, later: UsageFields) -> UsageFields:
        """Update the counts with those that ``later`` has: messages report input first, output last, and
        each time all so far."""
        counts = later.prompt_tokens, later.completion_tokens
        if self.prompt_tokens_details is None and isinstance(counts[0], int) and isinstance(counts[1], int):
            return later  # completions and chat report all at once
        fields = UsageFields.__struct_fields__
        values = [getattr(later, name) for name in fields]
        return UsageFields(
            *(
                value if isinstance(value, dict | list) or _count(value) is not None else getattr(self, name)
                for name, value in zip(fields, values, strict=True)
            )
        )


class ReportedUsage(msgspec.Struct, frozen=True):
    """Tokens as counted by the model server; None: not reported."""

    input_tokens: int | None = None
    """All tokens of the prompt, in every API."""
    output_tokens: int | None = None
    cached_tokens: int | None = None
    """Tokens of the prompt that were in the server's cache."""
    reasoning_tokens: int | None = None
    """Output tokens of a reasoning."""


class CountedTokens(NamedTuple):
    """Tokens of a request that count; None: not known."""

    input: int | None = None
    """All tokens of the prompt."""
    cached: int | None = None
    """Those of them that were in the server's cache."""
    output: int | None = None
    """All tokens of the reply."""
    reasoning: int | None = None
    """Those of them that are of a reasoning."""


def read_usage(usage: UsageFields) -> ReportedUsage | None:
    """The counts; None: there are none."""
    details = usage.prompt_tokens_details or usage.input_tokens_details
    read = _count(usage.cache_read_input_tokens)
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else read
    input_tokens = _count(usage.input_tokens)
    if input_tokens is None:
        input_tokens = _count(usage.prompt_tokens)
    else:  # messages exclude what was read from the cache, or written to it
        input_tokens += (read or 0) + (_count(usage.cache_creation_input_tokens) or 0)
    output_tokens = _count(usage.output_tokens)
    for each in usage.iterations if isinstance(usage.iterations, list) else ():
        if isinstance(each, dict) and each.get("type") == "compaction":
            names = "input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"
            input_tokens = (input_tokens or 0) + sum(_count(each.get(name)) or 0 for name in names)
            output_tokens = (output_tokens or 0) + (_count(each.get("output_tokens")) or 0)
    if output_tokens is None:
        output_tokens = _count(usage.completion_tokens)
    if input_tokens is None and output_tokens is None:
        return None
    details = usage.completion_tokens_details or usage.output_tokens_details
    reasoning = _count(details.get("reasoning_tokens")) if isinstance(details, dict) else None
    return ReportedUsage(input_tokens, output_tokens, cached, reasoning)


def _count(value: object) -> int | None:
    """A number of tokens; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_TOKENS:
        return None
    return int(value)
