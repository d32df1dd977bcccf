"""What takes long is made in slices."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from penstock.metrics.shared_exposition import SharedExposition, in_slices


def test_others_have_a_turn_after_each_slice() -> None:
    now, order = 0.0, list[str]()

    def made() -> Iterator[int]:
        nonlocal now
        for number in range(6):
            now += 2.0
            order.append(str(number))
            yield number

    async def other() -> None:
        for _ in range(4):
            order.append("other")
            await asyncio.sleep(0)

    async def run() -> None:
        beside = asyncio.ensure_future(other())
        assert await in_slices(made(), lambda: now, slice_s=4.0) == list(range(6))
        await beside

    asyncio.run(run())
    assert order == ["0", "1", "other", "2", "3", "other", "4", "5", "other", "other"]


def test_who_waits_gets_one_text_that_begins_later() -> None:
    made = 0

    async def make() -> bytes:
        nonlocal made
        made += 1
        return str(made).encode()

    async def run() -> None:
        shared = SharedExposition(make)
        assert await asyncio.gather(*(shared.get() for _ in range(5))) == [b"1"] * 5
        assert await shared.get() == b"2"

    asyncio.run(run())
