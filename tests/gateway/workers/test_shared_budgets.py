"""Budgets that workers share: the keeper has them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from penstock.gateway.admission.budget_store import BudgetStoreError, Charge
from penstock.gateway.requests.caller import Budget
from penstock.gateway.workers import letters
from penstock.gateway.workers.shared_budgets import SharedBudgetStore
from tests.gateway.workers.linked import Gateway, gateway_of, know_each_other, stream_of

BUDGET = Budget("tokens-per-day", 100, 86_400.0)


class Worker:
    def __init__(self, gateway: Gateway, number: int, epoch: int = 0) -> None:
        self.link, _ = gateway.link(number, epoch)
        self.store = SharedBudgetStore(self.link, timeout_s=5.0)

    async def take(self, amount: int, most: int | None = None, request: str = "r") -> bool:
        found = await self.store.reserve("a", request, [Charge(BUDGET, amount)], most)
        return found.granted

    def settle(self, request: str) -> None:
        """It has ended, and counted as a concurrent one."""
        self.store.settle("a", request, [], counted=True)


@contextlib.asynccontextmanager
async def two(path: Path) -> AsyncIterator[tuple[Gateway, Worker, Worker]]:
    async with gateway_of(path) as gateway:
        first, second = Worker(gateway, 0), Worker(gateway, 1)
        await know_each_other(first.link, second.link)
        yield gateway, first, second


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(10_000):
        if await condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not happen")


def test_what_one_takes_the_other_has_not(tmp_path: Path) -> None:
    async def run() -> None:
        async with two(tmp_path) as (_, first, second):
            assert await first.take(30)
            granted = await asyncio.gather(*(second.take(10) for _ in range(9)))
            assert granted == [True] * 7 + [False] * 2
            assert not await first.take(10)
            second.store.settle("a", "r", [Charge(BUDGET, -20)], counted=False)
            await until(lambda: first.take(10))
            assert await second.take(10)
            assert not await second.take(10)

    asyncio.run(run())


def test_requests_at_a_time(tmp_path: Path) -> None:
    async def run() -> None:
        async with two(tmp_path) as (_, first, second):
            assert await second.take(1, most=1)
            assert not await first.take(1, most=1)
            second.settle("r")
            await until(lambda: first.take(1, most=1))

    asyncio.run(run())


def test_requests_of_two_workers_have_names_of_their_own(tmp_path: Path) -> None:
    async def run() -> None:
        async with two(tmp_path) as (_, first, second):
            assert await first.take(1, most=2, request="same")
            assert await second.take(1, most=2, request="same")
            assert not await first.take(1, most=2, request="third")
            second.settle("same")
            await until(lambda: first.take(1, most=2, request="third"))
            assert not await second.take(1, most=2, request="fourth")

    asyncio.run(run())


@pytest.mark.parametrize("killed", [True, False])
def test_requests_of_a_worker_that_died_count_no_more(tmp_path: Path, killed: bool) -> None:
    async def run() -> None:
        async with two(tmp_path) as (gateway, first, second):
            assert await first.take(1, most=2, request="r1")
            assert await second.take(1, most=2, request="r2")
            assert not await first.take(1, most=2, request="r3")
            if killed:
                gateway.kill(second.link)
            else:
                await gateway.end(second.link)
            await know_each_other(first.link)
            assert await first.take(1, most=2, request="r3")
            assert not await first.take(1, most=2, request="r4")

    asyncio.run(run())


def test_no_end_of_a_request_is_lost_while_the_keeper_is_late(tmp_path: Path) -> None:
    """More than its socket has room for waits, and comes in order."""

    async def run() -> None:
        async with two(tmp_path) as (gateway, first, second):
            names = [f"r{number}" for number in range(40)]
            for name in names:
                assert await second.take(0, most=40, request=name)
            with gateway.hangs():
                for number in range(20_000):
                    second.store.settle("a", f"{'x' * 64}{number}", [Charge(BUDGET, 0)], counted=False)
                    if not number % 100:
                        await asyncio.sleep(0)
                for name in names:
                    second.settle(name)
                    await asyncio.sleep(0)
                assert stream_of(second.link).transport.get_write_buffer_size()
            await until(lambda: first.take(0, most=1, request="last"))

    asyncio.run(run())


def test_budgets_outlive_all_workers(tmp_path: Path) -> None:
    """One that was killed, one that has ended, and those that follow them: what is left is counted once."""

    async def run() -> None:
        async with two(tmp_path) as (gateway, first, second):
            assert await first.take(50, most=2, request="r1")
            assert await second.take(10, most=2, request="r2")
            gateway.kill(first.link)
            await know_each_other(second.link)
            assert not await second.take(50, request="r3")
            assert await second.take(0, most=2, request="r3"), "r1 has ended with its worker"
            assert not await second.take(0, most=2, request="r4")
            await second.store.close()
            await gateway.end(second.link)
            third, fourth = Worker(gateway, 0, 1), Worker(gateway, 1, 1)
            await know_each_other(third.link, fourth.link)
            assert not await third.take(50)
            assert await fourth.take(40)
            assert not await third.take(1)

    asyncio.run(run())


def test_what_a_worker_settles_as_it_ends_counts(tmp_path: Path) -> None:
    async def run() -> None:
        async with two(tmp_path) as (gateway, first, second):
            assert await second.take(80)
            second.store.settle("a", "r", [Charge(BUDGET, -60)], counted=False)
            await second.store.close()
            await gateway.end(second.link)
            await know_each_other(first.link)
            assert await first.take(80)
            assert not await first.take(1)

    asyncio.run(run())


def test_a_keeper_that_is_silent(tmp_path: Path) -> None:
    async def run() -> None:
        async with two(tmp_path) as (gateway, first, second):
            second.store._timeout_s = 0.01
            with gateway.hangs(), pytest.raises(BudgetStoreError, match="is silent"):
                await second.take(1, most=1)
            second.store._timeout_s = 5.0
            left = asyncio.ensure_future(second.take(1, most=1, request="left"))
            await asyncio.sleep(0)  # it is asked for
            await asyncio.sleep(0)
            left.cancel()
            assert await second.take(0, request="later")
            assert await first.take(1, most=1, request="next")  # nobody waited for the first one's answer

    asyncio.run(run())


@pytest.mark.parametrize("full", [True, False])
def test_a_keeper_that_takes_no_questions_is_not_waited_for(
    tmp_path: Path, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many wait for it that no more can, or it is gone."""

    async def run() -> None:
        async with two(tmp_path) as (_, _, second):
            if full:
                monkeypatch.setattr(letters, "MAX_UNSENT_BYTES", 0)
            else:
                await second.link.close()
            with pytest.raises(BudgetStoreError, match="is silent"):
                await asyncio.wait_for(second.take(1), 4.0)

    asyncio.run(run())


def test_which_workers_may_live_is_known_to_all(tmp_path: Path) -> None:
    """As the store in Redis needs it."""

    async def run() -> None:
        async with two(tmp_path) as (gateway, first, second):
            third = Worker(gateway, 2)
            await know_each_other(first.link, second.link, third.link)
            gateway.kill(first.link)
            await know_each_other(second.link, third.link)
            assert second.link.first_epochs == third.link.first_epochs == {0: 1, 1: 0, 2: 0}
            later = Worker(gateway, 0, 2)
            await know_each_other(second.link, third.link, later.link)
            assert later.link.first_epochs == {0: 2, 1: 0, 2: 0}

    asyncio.run(run())
