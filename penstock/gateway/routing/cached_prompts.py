"""What is known exactly of endpoints' prefix caches, for routing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.gateway.requests.incoming_request import IncomingRequest
from penstock.gateway.routing.endpoint import Endpoint


@dataclass(frozen=True, slots=True)
class CachedPrompt:
    """One request's prompt, as token ids, and where it is cached."""

    tokens: bytes
    """int32"""
    adapter: str | None = None
    salt: str | None = None
    shares: Mapping[Endpoint, float] = field(default_factory=dict)
    """Share of the prompt that endpoints have in their KV cache, 0 to 1, for those that tell."""


class CachedPrompts(Protocol):
    """Knows the prefix caches of endpoints."""

    async def find_cached(
        self, incoming: IncomingRequest, endpoints: Sequence[Endpoint], now: float
    ) -> CachedPrompt | None:
        """Where the prompt of a request is cached; None: unknown. The tokens are asked of the first of
        ``endpoints`` that can tell."""
        ...

    def expect(self, prompt: CachedPrompt, endpoint: Endpoint, now: float) -> None:
        """The endpoint is sent the prompt."""
        ...

    def forget(self, endpoint: Endpoint) -> None:
        """The endpoint has left the pool."""
        ...
