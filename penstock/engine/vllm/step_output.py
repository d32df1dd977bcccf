"""What vLLM gave: plain data, without its types."""

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
    """What one step gave: one entry per request with output, and the few facts that only some have."""

    ids: list[str]
    tokens: list[list[int]]
    ended: list[tuple[int, FinishReason | None]] = field(default_factory=list)
    """(entry, why it ended); None: by an error inside vLLM."""
    cached: list[tuple[int, int]] = field(default_factory=list)
    """(entry, prompt tokens found in the prefix cache) with a request's first output."""
    logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    """(entry, logprobs of its tokens)"""
    prompts: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    """(entry, logprobs of its prompt from the second token on)"""
    transfers: list[tuple[int, KVTransferParams]] = field(default_factory=list)
    """(entry, what its connector says at its end)"""


@dataclass(slots=True)
class VllmCounters:
    """What vLLM's scheduler has counted since the start."""

    steps: int = 0
    kv_usage: float = 0.0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
