"""What a step of vLLM's gives beside tokens, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from penstock.engine.base import ACCEPTED_PER_POSITION
from penstock.wire.arrays import F32, I32
from penstock.wire.frames import FinishReason
from penstock.wire.messages import UNAVAILABLE, KVTransferParams
from penstock.wire.vllm.messages import SchedulerStats

FAILED = "vLLM ended this request by an error; the engine's log says more"
MAX_ERROR_CHARS = 200
"""Characters of vLLM's error messages that clients get."""


@dataclass(slots=True)
class LogprobArrays:
    """Logprobs of L tokens: ids int32[L, W], values float32[L, W], the token itself first; rank int32[L]."""

    ids: I32
    values: F32
    rank: I32


@dataclass(slots=True)
class StepEvents:
    """What only some entries of a step's output have, as sparse lists. An entry is a request with output."""

    ended: list[tuple[int, FinishReason | None]] = field(default_factory=list)
    """(entry, finish reason) of ended requests; None: an error inside vLLM."""
    errors: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Code and message of StreamFailed of what vLLM says of errors, by entry, where it does."""
    cached: list[tuple[int, int]] = field(default_factory=list)
    """(entry, prompt tokens found in the prefix cache) with a request's first output."""
    preempted: list[int] = field(default_factory=list)
    """Entry of a request that was preempted, once for each time."""
    logprobs: list[tuple[int, LogprobArrays]] = field(default_factory=list)
    """(entry, logprobs of its tokens)"""
    prompts: list[tuple[int, LogprobArrays]] = field(default_factory=list)
    """(entry, logprobs of its prompt from the second token on)"""
    transfers: list[tuple[int, KVTransferParams]] = field(default_factory=list)
    """(entry, kv_transfer_params from its connector) of ended requests."""


@dataclass(slots=True)
class VllmCounters:
    """Counters of vLLM's scheduler since the start, and its current KV cache usage."""

    kv_usage: float = 0.0
    """Fraction of the KV cache in use, 0 to 1."""
    waiting: int = 0
    """Requests that vLLM has not begun yet, when it has last told."""
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

    def add(self, stats: SchedulerStats) -> None:
        """Add those of one step."""
        self.kv_usage = stats.kv_cache_usage
        self.waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        prefix = stats.prefix_cache_stats
        if prefix is not None:
            self.prefix_queries += prefix.queries
            self.prefix_hits += prefix.hits
        connector = stats.connector_prefix_cache_stats
        if connector is not None:
            self.external_queries += connector.queries
            self.external_hits += connector.hits
        drafted = stats.spec_decoding_stats
        if drafted is not None:
            self.drafts += drafted.num_drafts
            self.draft_tokens += drafted.num_draft_tokens
            self.accepted_tokens += drafted.num_accepted_tokens
            before, added = self.accepted_per_position, drafted.num_accepted_tokens_per_pos
            self.accepted_per_position = [sum(pair) for pair in zip_longest(before, added, fillvalue=0)]

    def metrics(self) -> dict[str, float]:
        """As :meth:`penstock.engine.base.Engine.metrics` names them."""
        per_position = {
            f"{ACCEPTED_PER_POSITION}{place}": count for place, count in enumerate(self.accepted_per_position)
        }
        return {
            "preemptions_total": self.preemptions,
            "prefix_cache_queries_total": self.prefix_queries,
            "prefix_cache_hits_total": self.prefix_hits,
            "external_prefix_cache_queries_total": self.external_queries,
            "external_prefix_cache_hits_total": self.external_hits,
            "external_prompt_tokens_total": self.external_prompt_tokens,
            "spec_decode_drafts_total": self.drafts,
            "spec_decode_draft_tokens_total": self.draft_tokens,
            "spec_decode_accepted_tokens_total": self.accepted_tokens,
            **per_position,
        }


def error_of(error: dict[str, Any]) -> tuple[str, str]:
    """Return code and message of StreamFailed for vLLM's RequestError."""
    message = str(error.get("message") or FAILED)[:MAX_ERROR_CHARS]
    if error.get("code") == "validation_error":
        return "invalid_request", f"vLLM refused this request: {message}"
    if error.get("retryable") is True:
        return UNAVAILABLE, f"vLLM cannot run this request now: {message}"
    return "engine_error", f"vLLM ended this request by an error: {message}"
