"""Workers of one gateway in the process of a test: the keeper, the scoreboard, and their links to both."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from penstock.gateway.workers.keeper import Keeper
from penstock.gateway.workers.keeper_link import KeeperLink
from penstock.gateway.workers.letters import LetterStream, WorkerName
from penstock.gateway.workers.scoreboard import Scoreboard, ScoreboardFile


class Gateway:
    """What the supervisor has."""

    def __init__(self, run_dir: Path, keeper: Keeper, board: ScoreboardFile) -> None:
        self.keeper = keeper
        self.board = board
        self._run_dir = str(run_dir)
        self._slots: dict[KeeperLink, int] = {}

    def link(self, number: int, epoch: int = 0) -> tuple[KeeperLink, Scoreboard]:
        """Those of a worker that starts; its link is not open."""
        worker = WorkerName(number, epoch)
        link = KeeperLink(self.keeper.add_worker(worker), worker, "gateway")
        self._slots[link] = self.board.take_slot()
        return link, Scoreboard(link, self._run_dir, self._slots[link])

    async def end(self, link: KeeperLink) -> None:
        """The worker ends as it should."""
        await link.close()
        link._socket.close()
        self.board.free_slot(self._slots.pop(link))

    def kill(self, link: KeeperLink) -> None:
        """The worker is killed: what it has not sent is lost."""
        if link._stream is None:
            link._socket.close()
        else:
            link._stream.transport.abort()
        self.board.free_slot(self._slots.pop(link))

    @contextlib.contextmanager
    def hangs(self) -> Iterator[None]:
        """The keeper does nothing meanwhile."""
        held, go_on = threading.Event(), threading.Event()

        def hang() -> None:
            held.set()
            go_on.wait()

        self.keeper._loop.call_soon_threadsafe(hang)
        held.wait()
        try:
            yield
        finally:
            go_on.set()

    async def close(self) -> None:
        for link in list(self._slots):
            await self.end(link)


@contextlib.asynccontextmanager
async def gateway_of(run_dir: Path, clock: Callable[[], float] = time.monotonic) -> AsyncIterator[Gateway]:
    with ScoreboardFile(str(run_dir)) as board, Keeper(clock) as keeper:
        gateway = Gateway(run_dir, keeper, board)
        try:
            yield gateway
        finally:
            await gateway.close()


def stream_of(link: KeeperLink) -> LetterStream:
    assert link._stream is not None
    return link._stream


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not happen")


async def know_each_other(*links: KeeperLink) -> None:
    """Those that are not open are opened."""
    for link in links:
        if link._stream is None:
            await link.open()
    await until(lambda: all(len(link.siblings) == len(links) - 1 for link in links))
