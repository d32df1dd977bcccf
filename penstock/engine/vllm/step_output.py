"""The output of a step of vLLM's, as plain data without vLLM's types."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.wire.arrays import F32, I32
from penstock.wire.frames import FinishReason
from penstock.wire.messages import KVTransferParams


@dataclass(slots=True)
class TokenLogprobs:
    """Logprobs of L tokens: ids int32[L, W], values float32[L, W], the token itself first; rank int32[L]."""

    ids: I32
    values: F32
    rank: I32


@dataclass(slots=True)
class VllmStepOutput:
    """One entry per request with output, and sparse lists of the fields that only some entries have."""

    ids: list[str]
    """Request ids."""
    tokens: list[list[int]]
    """New tokens of each request."""
    ended: list[tuple[int, FinishReason | None]] = field(default_factory=list)
    """(entry, finish reason) of ended requests; None: an error inside vLLM."""
    cached: list[tuple[int, int]] = field(default_factory=list)
    """(entry, prompt tokens found in the prefix cache) with a request's first output."""
    preempted: list[int] = field(default_factory=list)
    """Entry of a request that was preempted, once for each time."""
    logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    """(entry, logprobs of its tokens)"""
    prompts: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    """(entry, logprobs of its prompt from the second token on)"""
    transfers: list[tuple[int, KVTransferParams]] = field(default_factory=list)
    """(entry, kv_transfer_params from its connector) of ended requests."""


@dataclass(slots=True)
class VllmCounters:
    """Counters of vLLM's scheduler since the start, and its current KV cache usage."""

    kv_usage: float = 0.0
    """Fraction of the KV cache in use, 0 to 1."""
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    external_queries: int = 0
    """Prompt tokens that were looked up at the KV connector."""
    external_hits: int = 0
    external_prompt_tokens: int = 0
    """Prompt tokens whose keys and values came through the KV connector."""
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    """Accepted tokens by their position in the draft."""
