"""Which endpoints get a request, or its prompt, where they have roles; without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.gateway.disaggregation import disaggregated_prefill
from penstock.gateway.disaggregation.disaggregated_prefill import DisaggregatedPrefill
from penstock.gateway.models.directory import ModelDirectory
from penstock.gateway.models.learner import ModelLearner
from penstock.gateway.models.pools import Pool
from penstock.gateway.requests.incoming_request import IncomingRequest
from penstock.gateway.requests.request_body import read_request
from penstock.gateway.responses.request_record import RequestRecord
from penstock.gateway.routing.cached_prompts import CachedPrompt, CachedPrompts
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.endpoint_discovery import ResolvedEndpoint
from penstock.gateway.routing.endpoint_pool import EndpointPool
from penstock.gateway.routing.pick_request import PickRequest
from penstock.gateway.routing.picker import Picker
from penstock.gateway.routing.prefix_affinity import BLOCK_ENDS
from penstock.gateway.routing.router import Router
from penstock.gateway.upstream.connection_pool import ConnectionPool
from penstock.gateway.upstream.upstream import Upstream
from tests.gateway.routers import admits_all

REPLY = b'{"choices":[],"kv_transfer_params":{"remote_host":"h"}}'
MIN_TOKENS = 500
POOLS = (
    Pool(name="prefill", role="prefill", models=["m"]),
    Pool(name="decode", role="decode", models=["m"], fallback=["spare"]),
    Pool(name="spare", models=["m"]),
)


class World:
    """A router over three endpoints of each pool; those that prefill note who was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, caches: CachedPrompts | None = None) -> None:
        self.pool = EndpointPool(Upstream(), lambda endpoint: None)
        self.pool.update(
            ResolvedEndpoint(
                f"http://{pool.name}-{n}:8000", None, f"{pool.name}-{n}:8000", pool.name, pool.role
            )
            for pool in POOLS
            for n in range(3)
        )
        self.asked: list[Endpoint] = []
        picker = Picker({"tokens": 1.0, "prefix": 1.0})
        directory = ModelDirectory()
        directory.update(self.pool.endpoints, POOLS)
        self.router = Router(
            self.pool,
            ModelLearner(self.pool, directory, lambda: 100.0),
            picker,
            lambda: 100.0,
            admits_all(lambda: 100.0),
        )
        self.router.prefill = prefill = DisaggregatedPrefill(
            self.pool, picker, lambda: 100.0, min_tokens=MIN_TOKENS, timeout_s=5.0, caches=caches
        )
        prefill.follow(self.pool.endpoints)
        self.router.caches = caches
        monkeypatch.setattr(disaggregated_prefill, "fetch", self._fetch)

    async def _fetch(self, connections: ConnectionPool, *more: Any) -> tuple[int, bytes]:
        self.asked += [each for each in self.pool.endpoints if self.pool.connections(each) is connections]
        return 200, REPLY

    def of(self, pool: str) -> list[Endpoint]:
        return [each for each in self.pool.endpoints if each.pool == pool]

    def prepare(self, prompt: str, subset: frozenset[str] | None = None) -> PickRequest:
        body = read_request(b'{"model":"m","prompt":"%s"}' % prompt.encode())
        incoming = IncomingRequest("POST", b"/v1/completions", "/v1/completions", [], body.raw, body, "m")
        record = RequestRecord(began_at=100.0, path=incoming.path)
        return asyncio.run(self.router.prepare(replace(incoming, subset=subset), record))


def test_a_long_prompt_is_computed_by_one_that_prefills(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    request = world.prepare("x" * 4000)
    assert request.transfer == b'{"remote_host":"h"}'
    assert [each.pool for each in world.asked] == ["prefill"]
    assert world.router.pick(request).pool == "decode"


def test_what_is_cached_counts_by_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a long prompt are not of one size."""
    world = World(monkeypatch)
    sizes = [end - before for before, end in pairwise(BLOCK_ENDS)]
    last = next(n for n, size in enumerate(sizes, 1) if size > 4 * MIN_TOKENS)
    world.router.pick(world.prepare("x" * BLOCK_ENDS[last]))
    assert len(world.asked) == 1
    world.router.pick(world.prepare("x" * BLOCK_ENDS[last] + "y" * 1000))
    assert len(world.asked) == 1
    world.router.pick(world.prepare("x" * BLOCK_ENDS[last - 1] + "y" * sizes[last - 1]))
    assert len(world.asked) == 2


def test_those_that_prefill_do_not_keep_a_request_from_its_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    for endpoint in world.of("decode"):
        endpoint.breaker.open_as_reported(99.0, 200.0, avoids=True)
    assert world.router.pick(world.prepare("x")).pool == "spare"


def test_a_subset_holds_for_those_that_prefill_too(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    subset = frozenset({"prefill-1:8000", "decode-1:8000"})
    for number in range(5):
        request = world.prepare(f"{number}" * 4000, subset)
        assert world.router.pick(request).url == "http://decode-1:8000"
    assert {each.url for each in world.asked} == {"http://prefill-1:8000"}
    world.prepare("y" * 4000, frozenset({"decode-1:8000"}))
    assert len(world.asked) == 5
    assert isinstance(world.router.prefill, DisaggregatedPrefill)
    assert {figure.value for figure in world.router.prefill.figures()} == {5.0, 0.0}, "nobody has failed"


class Caches:
    """Notes what it is asked and told."""

    def __init__(self) -> None:
        self.asked: list[set[str]] = []
        self.expected: list[str] = []

    async def find_cached(
        self, incoming: IncomingRequest, endpoints: Sequence[Endpoint], now: float
    ) -> CachedPrompt | None:
        self.asked.append({each.url for each in endpoints})
        return CachedPrompt(b"")

    def expect(self, prompt: CachedPrompt, endpoint: Endpoint, now: float) -> None:
        self.expected.append(endpoint.pool)

    def forget(self, endpoint: Endpoint) -> None: ...


def test_a_subset_holds_for_questions_for_tokens_too(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = Caches()
    world = World(monkeypatch, caches)
    world.prepare("x", frozenset({"prefill-1:8000", "decode-1:8000"}))
    assert caches.asked == [{"http://prefill-1:8000", "http://decode-1:8000"}]


def test_both_endpoints_are_expected_to_cache_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = Caches()
    world = World(monkeypatch, caches)
    world.router.pick(world.prepare("x" * 4000))
    assert caches.expected == ["prefill", "decode"]
