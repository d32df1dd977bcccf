"""Coroutines that run without a task until they wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from penstock.http.eager import TasklessFuture, in_task, run_eagerly


def in_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())  # type: ignore[arg-type]

    run.__name__ = test.__name__
    return run


@in_loop
async def test_what_does_not_wait_has_ended_without_a_task() -> None:
    seen, tasks = list[str](), set[asyncio.Task[None]]()

    async def inner() -> str:
        return "done"

    async def work() -> None:
        seen.append(await inner())

    run_eagerly(work(), tasks)
    assert seen == ["done"]
    assert tasks == set()


@in_loop
async def test_what_waits_goes_on_in_a_task_that_is_kept_until_it_ends() -> None:
    loop = asyncio.get_running_loop()
    first, second = loop.create_future(), loop.create_future()
    seen, tasks = list[object](), set[asyncio.Task[None]]()

    async def work() -> None:
        seen.append(await first)
        await asyncio.sleep(0)
        try:
            await second
        except ValueError as error:
            seen.append(str(error))
        async with asyncio.timeout(10):  # there is a task now
            await asyncio.sleep(0)
        seen.append("timed")

    run_eagerly(work(), tasks)
    assert len(tasks) == 1
    first.set_result(1)
    second.set_exception(ValueError("two"))
    await asyncio.gather(*tasks)
    await asyncio.sleep(0)
    assert seen == [1, "two", "timed"]
    assert tasks == set()


@in_loop
async def test_a_cancelled_task_cancels_what_it_waits_for() -> None:
    waited, seen, tasks = asyncio.get_running_loop().create_future(), list[str](), set[asyncio.Task[None]]()

    async def work() -> None:
        try:
            await waited
        finally:
            seen.append("cleaned")

    run_eagerly(work(), tasks)
    [task] = tasks
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert waited.cancelled()
    assert seen == ["cleaned"]


@in_loop
async def test_an_exception_before_the_first_wait_is_raised() -> None:
    async def fail() -> None:
        raise ValueError("at once")

    with pytest.raises(ValueError, match="at once"):
        run_eagerly(fail(), set())


@in_loop
async def test_what_needs_a_task_from_its_start_gets_one() -> None:
    seen, tasks = list[int](), set[asyncio.Task[None]]()

    async def work(value: int) -> None:
        async with asyncio.timeout(10):
            await asyncio.sleep(0)
        seen.append(value)

    run_eagerly(in_task(work)(7), tasks)
    await asyncio.gather(*tasks)
    assert seen == [7]


@in_loop
async def test_a_taskless_future_needs_no_task() -> None:
    loop = asyncio.get_running_loop()
    first, second = TasklessFuture[str](), TasklessFuture[str]()
    third = loop.create_future()
    seen, tasks = list[object](), set[asyncio.Task[None]]()

    async def work() -> None:
        seen.append(await first)
        try:
            await second
        except ValueError as error:
            seen.append(str(error))
        seen.append(await third)

    run_eagerly(work(), tasks)
    assert not tasks
    first.set_result("one")
    await asyncio.sleep(0)
    assert seen == ["one"]
    assert not tasks
    second.set_exception(ValueError("two"))
    await asyncio.sleep(0)
    assert seen == ["one", "two"]
    (task,) = tasks
    third.set_result("three")
    await task
    assert seen == ["one", "two", "three"]
    assert not tasks


@in_loop
async def test_a_task_may_wait_for_a_taskless_future() -> None:
    future, seen = TasklessFuture[int](), list[int]()

    async def work() -> None:
        await asyncio.sleep(0)
        seen.append(await future)

    tasks = set[asyncio.Task[None]]()
    run_eagerly(work(), tasks)
    asyncio.get_running_loop().call_later(0.01, future.set_result, 1)
    await asyncio.gather(*tasks)
    assert seen == [1]
