"""Workers of one gateway in the process of a test: the keeper, the scoreboard, and their links to both."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.gateway.workers.keeper import Keeper
from penstock.gateway.workers.keeper_link import KeeperLink
from penstock.gateway.workers.letters import WorkerName
from penstock.gateway.workers.scoreboard import Scoreboard, ScoreboardFile


class Gateway:
    """What the supervisor has."""

    def __init__(self, run_dir: Path, keeper: Keeper, board: ScoreboardFile) -> None:
        self.keeper = keeper
        self.run_dir = str(run_dir)
        self.board = board
        self._slots: dict[KeeperLink, int] = {}

    def link(self, number: int, epoch: int = 0) -> tuple[KeeperLink, Scoreboard]:
        """Those of a worker that starts; its link is not open."""
        worker = WorkerName(number, epoch)
        link = KeeperLink(self.keeper.add(worker), worker)
        self._slots[link] = self.board.take_slot()
        return link, Scoreboard(link, self.run_dir, self._slots[link])

    def end(self, link: KeeperLink) -> None:
        """The worker ends as it should, if it has not yet."""
        if link in self._slots:
            link.close()
            self.board.free_slot(self._slots.pop(link))

    def kill(self, link: KeeperLink) -> None:
        """The worker is killed: what it has not sent is lost."""
        link._end(0.0)
        self.board.free_slot(self._slots.pop(link))

    @contextlib.contextmanager
    def hangs(self) -> Iterator[None]:
        """The keeper does nothing meanwhile."""
        held, go_on = threading.Event(), threading.Event()

        def select(wait_s: float | None) -> list[tuple[selectors.SelectorKey, int]]:
            held.set()
            go_on.wait()
            return []

        selector, self.keeper._selector = self.keeper._selector, Hanging(select)  # type: ignore[assignment]
        self.keeper._wake_up()
        held.wait()
        try:
            yield
        finally:
            self.keeper._selector = selector
            go_on.set()

    def close(self) -> None:
        for link in list(self._slots):
            self.end(link)


class Hanging:
    """A selector that waits for the test."""

    def __init__(self, select: Callable[[float | None], list[tuple[selectors.SelectorKey, int]]]) -> None:
        self.select = select


@contextlib.contextmanager
def gateway_of(run_dir: Path, clock: Callable[[], float] = time.monotonic) -> Iterator[Gateway]:
    """To be used in an event loop."""
    with ScoreboardFile(str(run_dir)) as board, Keeper(clock) as keeper:
        gateway = Gateway(run_dir, keeper, board)
        try:
            yield gateway
        finally:
            gateway.close()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not happen")


async def know_each_other(*links: KeeperLink) -> None:
    await until(lambda: all(len(link.siblings) == len(links) - 1 for link in links))
