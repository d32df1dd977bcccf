from __future__ import annotations

import asyncio

from penstock.media.turns import TenantTurns


class Work:
    """Pictures that wait for a turn; each ends when it is told to."""

    def __init__(self, places: int = 1) -> None:
        self.turns = TenantTurns(places)
        self.order: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._goes_on = asyncio.Event()

    async def add(self, *names: str) -> None:
        for name in names:
            self.tasks[name] = asyncio.create_task(self._take(name))
        await settled()

    async def _take(self, name: str) -> None:
        async with self.turns.turn(name[0]):
            self.order.append(name)
            await self._goes_on.wait()

    async def finish(self) -> list[str]:
        self._goes_on.set()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        return self.order


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_tenants_take_turns() -> None:
    async def run() -> None:
        work = Work()
        await work.add("a1", "a2", "a3", "a4", "b1", "b2", "c1")
        assert work.order == ["a1"]
        assert await work.finish() == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]
        await work.add("b3")
        assert work.order[-1] == "b3"

    asyncio.run(run())


def test_several_have_turns_at_the_same_time() -> None:
    async def run() -> None:
        work = Work(3)
        await work.add("a1", "a2", "a3", "a4", "a5", "b1")
        assert work.order == ["a1", "a2", "a3"]
        assert await work.finish() == ["a1", "a2", "a3", "a4", "b1", "a5"]
        assert work.turns._free == 3

    asyncio.run(run())


def test_one_that_is_cancelled_has_no_turn() -> None:
    async def run() -> None:
        work = Work()
        await work.add("a1", "a2", "b1", "a3")
        work.tasks["a2"].cancel()
        work.tasks["a1"].cancel()
        await settled()
        assert work.order == ["a1", "a3"]
        assert await work.finish() == ["a1", "a3", "b1"]

    asyncio.run(run())


def test_one_that_is_cancelled_with_its_turn_passes_it_on() -> None:
    async def run() -> None:
        work = Work()
        await work.add("a1", "a2", "b1")
        work._goes_on.set()
        await asyncio.sleep(0)
        # The turn is a2's, which has not run yet.
        work.tasks["a2"].cancel()
        assert await work.finish() == ["a1", "b1"]

    asyncio.run(run())
