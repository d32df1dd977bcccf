"""Runs a coroutine without a task for as long as it does not wait.

Most requests are handled without waiting for anything, and a task, with its turn of the event loop, costs
several microseconds. Until a coroutine first waits, but for a :class:`TasklessFuture`, there is no
current task: it must not use what needs one, such as ``asyncio.timeout``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeVar

Argument = TypeVar("Argument")
Result = TypeVar("Result")


class TasklessFuture(asyncio.Future[Result]):
    """What :func:`run_eagerly` waits for without a task. Nothing but its own end ends the wait: no task that
    is cancelled."""


def run_eagerly(coroutine: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    """Run ``coroutine`` until it ends or first waits, but for a :class:`TasklessFuture`. A task, kept in
    ``tasks`` until its end, runs the rest.

    Exceptions before the first wait are raised here.
    """
    try:
        waited_for = coroutine.send(None)
    except StopIteration:
        return
    if isinstance(waited_for, TasklessFuture):
        waited_for.add_done_callback(lambda _: run_eagerly(coroutine, tasks))
        return
    task = asyncio.get_running_loop().create_task(_run_rest(coroutine, waited_for))
    tasks.add(task)
    task.add_done_callback(tasks.discard)


def in_task(
    function: Callable[[Argument], Awaitable[None]],
) -> Callable[[Argument], Coroutine[Any, Any, None]]:
    """``function``, run in a task from its start, as it needs one."""

    async def run(argument: Argument) -> None:
        await asyncio.ensure_future(function(argument))

    return run


async def _run_rest(coroutine: Coroutine[Any, Any, None], waited_for: Any) -> None:
    await _Rest(coroutine, waited_for)


class _Rest(Awaitable[None]):
    """The rest of a coroutine that has been started, and waits for what it has yielded."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], waited_for: Any) -> None:
        self._coroutine = coroutine
        self._waited_for = waited_for

    def __await__(self) -> Generator[Any, Any, None]:
        coroutine, waited_for = self._coroutine, self._waited_for
        while True:
            try:
                try:
                    value = yield waited_for
                except GeneratorExit:  # the loop was closed
                    coroutine.close()
                    raise
                except BaseException as error:  # noqa: BLE001 - a cancellation, for the coroutine
                    waited_for = coroutine.throw(error)
                else:
                    waited_for = coroutine.send(value)
            except StopIteration:
                return
