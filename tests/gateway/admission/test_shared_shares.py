"""Fair shares over several gateways, with a store of the test's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

from penstock.gateway.admission.budget_store import BudgetStoreError
from penstock.gateway.admission.fair_shares import FairShares
from penstock.gateway.admission.redis_budget_store import BudgetClient, RedisBudgetStore
from penstock.gateway.admission.shared_shares import SharedShares
from tests.gateway.redis_server import redis_server


class Store:
    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.away = False

    async def count_served(
        self, served: Mapping[str, float], asked: Iterable[str], forget_s: float
    ) -> Sequence[float]:
        if self.away:
            raise BudgetStoreError("time-out")
        for flow, tokens in served.items():
            assert tokens > 0, "sums only grow"
            self.sums[flow] = self.sums.get(flow, 0.0) + tokens
        return [self.sums.get(flow, 0.0) for flow in asked]


class Gateway:
    def __init__(self, store: Store) -> None:
        self.shares = FairShares()
        self.shared = SharedShares(self.shares, store)

    def serve(self, flow: str, estimated: float, tokens: float, weight: float = 1.0) -> None:
        expected = self.shares.begin(flow, estimated, weight)
        self.shares.end(flow, expected, tokens, weight, estimated)

    def exchange(self) -> None:
        asyncio.run(self.shared.exchange())


def test_what_others_served_counts_for_flows_that_wait() -> None:
    store = Store()
    here, there = Gateway(store), Gateway(store)
    for flow in ("a", "b"):
        here.shares.wait(flow)
    here.exchange()
    there.serve("a", 1000, 300, weight=3.0)
    here.serve("a", 100, 50)
    there.exchange()
    here.exchange()
    assert here.shares.start_of("a") == pytest.approx(50 + 100)
    assert here.shares.start_of("b") == 0
    here.exchange()
    assert here.shares.start_of("a") == pytest.approx(150), "once"


def test_estimates_that_were_told_are_corrected_by_what_follows() -> None:
    store = Store()
    here, there = Gateway(store), Gateway(store)
    here.shares.wait("a")
    here.exchange()
    expected = there.shares.begin("a", 1000, 1.0)
    there.exchange()
    here.exchange()
    assert here.shares.start_of("a") == 1000, "it runs"
    there.shares.end("a", expected, 100, 1.0)
    there.exchange()
    there.serve("a", 500, 950)
    there.exchange()
    here.exchange()
    assert here.shares.start_of("a") == pytest.approx(1050)


def test_a_store_that_is_away_or_began_anew_costs_nobody_anything() -> None:
    store = Store()
    here, there = Gateway(store), Gateway(store)
    here.shares.wait("a")
    there.serve("a", 10, 400)
    there.exchange()
    here.exchange()
    assert here.shares.start_of("a") == 0, "what was before its wait"
    store.away = True
    here.serve("a", 10, 20)
    here.exchange()
    store.away = False
    here.exchange()
    assert here.shares.start_of("a") == 20, "its own"
    store.sums.clear()
    there.serve("a", 10, 30)
    there.exchange()
    here.exchange()
    assert here.shares.start_of("a") == 50


def test_what_is_told_and_asked_at_once_is_bounded() -> None:
    shares = FairShares(most_flows=8)
    shares.untold = {}
    for number in range(20):
        shares.begin(f"f{number}", number + 1.0, 1.0)
        shares.wait(f"f{number}")
    assert len(shares.untold) == 8
    assert shares.take_untold(3) == {"f7": 8.0, "f6": 7.0, "f5": 6.0}
    assert len(shares.waiting_flows(5)) == 5


def test_redis_adds_and_forgets(tmp_path: Path) -> None:
    async def run(url: str) -> None:
        place = BudgetClient("g", "0.0", dict)
        store = RedisBudgetStore(url, timeout_s=30.0, longest_request_s=1.0, place=place)
        assert await store.count_served({"a": 1.5, "b" * 10_000: 2.0}, ["a"], 60.0) == [1.5]
        assert await store.count_served({"a": 1.0}, ["b" * 10_000, "a", "c"], 0.2) == [2.0, 2.5, 0.0]
        async with asyncio.timeout(10):
            while await store.count_served({}, ["a"], 60.0) != [0.0]:
                pass  # a round trip
        await store.close()

    with redis_server(tmp_path) as url:
        asyncio.run(run(url))
