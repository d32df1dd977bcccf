"""Follows the KV caches of a gateway's endpoints, and says where the prompt of a request is cached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from penstock.gateway.kv_events.block_index import BlockIndex
from penstock.gateway.kv_events.event_ports import EventPorts
from penstock.gateway.kv_events.prompt_tokens import PromptTokens
from penstock.gateway.kv_events.subscriber import KVEventSubscriber
from penstock.gateway.metric_definitions import (
    CACHED_PROMPTS,
    KV_EVENT_BATCHES,
    KV_EVENT_BLOCKS,
    KV_EVENT_RESETS,
    Figure,
)
from penstock.gateway.requests.incoming_request import IncomingRequest
from penstock.gateway.routing.cached_prompts import CachedPrompt
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.endpoint_pool import EndpointPool
from penstock.http.access_keys import presented_digest, tenant_of
from penstock.http.request import first_values

MIN_PROMPT_BYTES = 1024
"""Prompts below this are routed without: to compute them takes as long as to ask for their tokens."""


class _Fields(msgspec.Struct):
    cache_salt: str | None = None


_decode_fields = msgspec.json.Decoder(_Fields).decode


class FollowedCaches:
    """The KV caches of endpoints that publish events. Created in the event loop."""

    def __init__(self, ports: EventPorts, pool: EndpointPool, clock: Callable[[], float]) -> None:
        self.index = BlockIndex()
        self.tokens = PromptTokens(pool, clock)
        self.subscriber = KVEventSubscriber(self.index)
        self._results = Counter[str]()
        """Prompts that were looked up, by the result."""
        self._ports = ports
        self._by_tenant = False
        """Whether what was found last is of a server that keeps the caches of its keys apart."""

    def follow(self, endpoints: Iterable[Endpoint]) -> None:
        """Follow these endpoints from now on."""
        self.subscriber.update(
            addresses
            for endpoint in endpoints
            if not endpoint.upstream.hosted
            for addresses in self._ports.addresses(endpoint)
        )

    async def run(self) -> None:
        """Never ends; raises what following the caches has raised."""
        await self.subscriber.watch()

    def figures(self) -> Iterator[Figure]:
        """For metrics."""
        counts = self.subscriber.counts
        for state, count in (("applied", counts.applied), ("malformed", counts.malformed)):
            yield Figure(KV_EVENT_BATCHES, count, {"state": state})
        yield Figure(KV_EVENT_RESETS, counts.resets)
        yield Figure(KV_EVENT_BLOCKS, self.index.size)
        for result in ("found", "absent", "untokenized"):
            yield Figure(CACHED_PROMPTS, self._results[result], {"result": result})

    def close(self) -> None:
        self.subscriber.close()

    # -- requests

    async def find_cached(
        self, incoming: IncomingRequest, endpoints: Sequence[Endpoint], now: float
    ) -> CachedPrompt | None:
        """Where the prompt of a request is cached; None: unknown. The tokens are asked of the first of
        ``endpoints`` that can tell."""
        body = incoming.body
        if body is None or len(body.prompt) < MIN_PROMPT_BYTES:
            return None
        if len(endpoints) < 2 or not self.index.size:
            return None
        followed = [endpoint for endpoint in endpoints if self.index.is_followed(endpoint)]
        if not followed:
            return None
        tokens = await self.tokens.of(incoming, followed)
        if not tokens:
            self._results["untokenized"] += 1
            return None
        adapter = body.model if self._is_adapter(body.model, followed) else None
        found, salt = self._find_by_salt(incoming, tokens, followed, adapter, now)
        if any(found.values()):
            self._results["found"] += 1
            total = len(tokens) // 4
            shares = {endpoint: count / total for endpoint, count in found.items()}
        else:
            self._results["absent"] += 1
            shares = {}
        return CachedPrompt(tokens, adapter, salt, shares)

    def _is_adapter(self, model: str, endpoints: Sequence[Endpoint]) -> bool:
        """Metrics name the adapters that have requests, events those that have had some."""
        return self.index.is_adapter(model) or any(model in each.load.adapters for each in endpoints)

    def _find_by_salt(
        self,
        incoming: IncomingRequest,
        tokens: bytes,
        endpoints: Sequence[Endpoint],
        adapter: str | None,
        now: float,
    ) -> tuple[dict[Endpoint, int], str | None]:
        """The tokens that endpoints have cached, and the salt of their caches: before that of the request,
        Penstock's servers with several API keys put the key's tenant."""
        sent = endpoints[0].upstream.form.headers(incoming.headers)
        salt, digest = _salt(incoming.raw), presented_digest(first_values(sent))
        salts = [salt, tenant_of(digest) + (salt or "")] if digest else [salt]
        if self._by_tenant:
            salts.reverse()
        for each in salts:
            found = self.index.cached(tokens, endpoints, now, adapter=adapter, salt=each)
            if any(found.values()):
                self._by_tenant = each != salt
                return found, each
        return {}, salts[0]

    def expect(self, prompt: CachedPrompt, endpoint: Endpoint, now: float) -> None:
        """The endpoint is sent the prompt."""
        self.index.expect(prompt.tokens, endpoint, now, adapter=prompt.adapter, salt=prompt.salt)

    def forget(self, endpoint: Endpoint) -> None:
        """The endpoint has left the pool."""
        self.tokens.forget(endpoint)
        self.index.forget(endpoint)


def _salt(raw: bytes) -> str | None:
    if b'"cache_salt"' not in raw:
        return None
    try:
        return _decode_fields(raw).cache_salt
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
