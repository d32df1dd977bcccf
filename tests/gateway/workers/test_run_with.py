"""A background task that ends is noticed."""

from __future__ import annotations

import asyncio

import pytest

from penstock.gateway.process import run_with


async def forever() -> None:
    await asyncio.Event().wait()


async def over() -> None:
    """Ends at once."""


async def fail() -> None:
    raise KeyError("model")


def test_the_end_of_the_main_task_ends_the_others() -> None:
    asyncio.run(asyncio.wait_for(run_with(over(), [forever(), forever()]), 60))


def test_errors_are_raised_whoever_has_them() -> None:
    for main, background in ((fail, forever), (forever, fail)):
        with pytest.raises(KeyError, match="model"):
            asyncio.run(asyncio.wait_for(run_with(main(), [background()]), 60))


def test_a_background_task_that_just_ends_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="a background task has ended"):
        asyncio.run(asyncio.wait_for(run_with(forever(), [over()]), 60))
