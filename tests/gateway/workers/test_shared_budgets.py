"""Budgets that workers share: one keeps them, and hands them on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from penstock.gateway.admission.budget_store import BudgetStoreError, Charge
from penstock.gateway.requests.sender import Budget
from penstock.gateway.workers.exchange import Exchange, WorkerName
from penstock.gateway.workers.shared_budgets import SharedBudgetStore

BUDGET = Budget("tokens-per-day", 100, 86_400.0)


class Worker:
    def __init__(self, path: Path, index: int, epoch: int = 0) -> None:
        self.exchange = Exchange(str(path), WorkerName(index, epoch))
        self.store = SharedBudgetStore(self.exchange, asyncio.get_running_loop().time, timeout_s=5.0)
        self.exchange.open()

    async def take(self, amount: int, most: int | None = None, request: str = "r") -> bool:
        found = await self.store.reserve("a", request, [Charge(BUDGET, amount)], most)
        return found.granted

    def settle(self, request: str) -> None:
        """It has ended, and counted as a concurrent one."""
        self.store.settle("a", request, [], counted=True)

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """It reads no datagrams."""
        loop, fd = asyncio.get_running_loop(), self.exchange._socket.fileno()
        loop.remove_reader(fd)
        yield
        loop.add_reader(fd, self.exchange._on_readable)

    def die(self) -> None:
        """Its path stays."""
        asyncio.get_running_loop().remove_reader(self.exchange._socket.fileno())
        self.exchange._socket.close()

    async def end(self) -> None:
        await self.store.close()
        self.exchange.close()


@contextlib.asynccontextmanager
async def two(path: Path) -> AsyncIterator[tuple[Worker, Worker]]:
    first, second = Worker(path, 0), Worker(path, 1)
    try:
        await knows(first, 1)
        yield first, second
    finally:
        for each in (first, second):
            with contextlib.suppress(ValueError):  # it has ended
                each.exchange.close()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(1000):
        if await condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not happen")


async def knows(worker: Worker, count: int) -> None:
    async def known() -> bool:
        return len(worker.exchange.siblings) == count

    await until(known)


def test_what_one_takes_the_other_has_not(tmp_path: Path) -> None:
    async def run() -> None:
        async with two(tmp_path) as (first, second):
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
        async with two(tmp_path) as (first, second):
            assert await second.take(1, most=1)
            assert not await first.take(1, most=1)
            second.settle("r")
            await until(lambda: first.take(1, most=1))

    asyncio.run(run())


def test_requests_of_a_worker_that_died_count_no_more(tmp_path: Path) -> None:
    async def run() -> None:
        async with two(tmp_path) as (first, second):
            assert await first.take(1, most=2, request="r1")
            assert await second.take(1, most=2, request="r2")
            assert not await first.take(1, most=2, request="r3")
            second.die()
            first.exchange.send("hello", b"")
            await knows(first, 0)
            assert await first.take(1, most=2, request="r3")
            assert not await first.take(1, most=2, request="r4")

    asyncio.run(run())


def test_no_end_of_a_request_is_lost_for_want_of_room(tmp_path: Path) -> None:
    """A socket takes no more than some 10 datagrams until its owner reads them."""

    async def run() -> None:
        async with two(tmp_path) as (first, second):
            names = [f"r{number}" for number in range(40)]
            for name in names:
                assert await second.take(1, most=40, request=name)
            with first.silent():
                for name in names:
                    second.settle(name)
                    await asyncio.sleep(0)
            await until(lambda: first.take(0, most=1, request="last"))

    asyncio.run(run())


@pytest.mark.parametrize("ends", [True, False])
def test_the_keeper_hands_its_state_on(tmp_path: Path, ends: bool) -> None:
    """As it ends, and to a worker that takes its place."""

    async def run() -> None:
        if ends:
            async with two(tmp_path) as (first, second):
                assert await first.take(80)
                await first.end()
                second.exchange.look()
                await knows(second, 0)

                async def has_state() -> bool:
                    return bool(second.store._memory._full_at)

                await until(has_state)
                assert not await second.take(30)
                assert await second.take(20)
        else:
            second = Worker(tmp_path, 1)
            assert await second.take(80)
            first = Worker(tmp_path, 0)
            await knows(second, 1)
            await second.take(0)  # the state has come with it, or before
            assert not await first.take(30)
            assert await first.take(20)
            for each in (first, second):
                each.exchange.close()

    asyncio.run(run())


def test_a_keeper_that_is_silent(tmp_path: Path) -> None:
    async def run() -> None:
        async with two(tmp_path) as (first, second):
            second.store._timeout_s = 0.01
            with first.silent(), pytest.raises(BudgetStoreError, match="is silent"):
                await second.take(1, most=1)
            second.store._timeout_s = 5.0
            left = asyncio.ensure_future(second.take(1, most=1, request="left"))
            await asyncio.sleep(0)  # it is asked for
            await asyncio.sleep(0)
            left.cancel()
            assert await second.take(0, request="later")
            assert await first.take(1, most=1, request="next")  # nobody waited for the first one's answer

    asyncio.run(run())


def test_what_a_keeper_was_asked_that_dies_its_successor_answers(tmp_path: Path) -> None:
    async def run() -> None:
        async with two(tmp_path) as (first, second):
            third = Worker(tmp_path, 2)
            await knows(second, 2)
            await knows(third, 2)
            with first.silent():
                asked = [asyncio.ensure_future(each.take(60)) for each in (second, third)]
                for _ in range(5):
                    await asyncio.sleep(0)
            first.die()
            for each in (second, third):
                each.exchange.send("hello", b"")
            assert sorted(await asyncio.gather(*asked)) == [False, True]
            assert second.exchange.first_epochs() == {0: 1, 1: 0, 2: 0}
            third.exchange.close()

    asyncio.run(run())


def test_budgets_outlive_a_keeper_that_is_killed(tmp_path: Path) -> None:
    """All but what the last second took; a successor that finds nobody alive knows them as well."""

    async def run() -> None:
        async with two(tmp_path) as (first, second):
            assert await first.take(50, most=2, request="r1")
            assert await second.take(10, most=2, request="r2")
            first.store.save()
            first.die()
            second.exchange.send("hello", b"")
            await knows(second, 0)
            assert not await second.take(50, request="r3")
            assert await second.take(0, most=2, request="r3"), "r1 has ended with its worker"
            assert not await second.take(0, most=2, request="r4")
            second.store.save()
            second.die()
            third, fourth = Worker(tmp_path, 0, 1), Worker(tmp_path, 1, 1)
            try:
                await knows(third, 1)
                await knows(fourth, 1)
                assert not await third.take(50)
                assert await fourth.take(40), "what is left is counted once"
            finally:
                third.exchange.close()
                fourth.exchange.close()

    asyncio.run(run())


def test_the_state_of_a_keeper_is_saved_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with two(tmp_path) as (first, second):
            saved = []
            monkeypatch.setattr(first.store, "save", lambda: saved.append(1))
            monkeypatch.setattr(second.store, "save", lambda: saved.append(2))
            for number in range(20):
                assert await second.take(1, request=str(number))
            assert saved == [1]

    asyncio.run(run())


def test_a_keeper_that_ends_leaves_no_file(tmp_path: Path) -> None:
    async def run() -> None:
        async with two(tmp_path) as (first, second):
            assert await first.take(80)
            first.store.save()
            await first.end()
            second.exchange.look()
            await knows(second, 0)
            assert await second.take(20), "it was handed on, and not read as well"

    asyncio.run(run())
