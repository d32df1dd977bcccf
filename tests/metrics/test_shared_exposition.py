"""A flood of scrapes makes few texts, and none is older than its request."""

from __future__ import annotations

import asyncio

import pytest

from penstock.metrics.shared_exposition import MIN_INTERVAL_S, SharedExposition


class Maker:
    def __init__(self) -> None:
        self.begun = self.running = 0
        self.has_begun, self.go_on = asyncio.Event(), asyncio.Event()

    async def make(self) -> bytes:
        self.begun += 1
        number = self.begun
        self.has_begun.set()
        self.running += 1
        assert self.running == 1
        await self.go_on.wait()
        self.running -= 1
        if number == 3:
            raise ValueError("a fault")
        return b"%d" % number


def test_requests_share_a_text_that_begins_after_them() -> None:
    async def run() -> None:
        maker = Maker()
        shared = SharedExposition(maker.make)
        first = [asyncio.ensure_future(shared.get()) for _ in range(100)]
        await maker.has_begun.wait()
        later = [asyncio.ensure_future(shared.get()) for _ in range(100)]
        await asyncio.sleep(0)
        gone = later.pop()
        gone.cancel()
        began = asyncio.get_running_loop().time()
        maker.go_on.set()
        assert set(await asyncio.gather(*first)) == {b"1"}
        assert set(await asyncio.gather(*later)) == {b"2"}
        assert asyncio.get_running_loop().time() - began > MIN_INTERVAL_S / 2
        with pytest.raises(ValueError, match="a fault"):
            await shared.get()
        assert await shared.get() == b"4"

    asyncio.run(run())
