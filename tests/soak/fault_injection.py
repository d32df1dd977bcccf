"""Deaths, hangs, pauses and replacements of a server's processes, one at a time, at random."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import psutil

from tests.soak.client import SentRequest
from tests.soak.server_processes import ProcessInstance, ProcessTree, client_ports, is_alive, process_of

PAUSES_S = (0.2, 2.0)
"""Shortest and longest time a process is stopped and goes on."""
SETTLED_S = 8.0
"""Age of a process from which on it may be disturbed: it is ready. To kill what starts is to fail its start,
and three of these end the server, as they should."""
GONE_S = 30.0
"""Time for what the system or the supervisor does at once, on a busy machine."""
REMEMBERED_S = 300.0
"""How long after a kill a client may notice it: longer than any request takes."""
POLL_S = 0.05

Fault = Callable[[], Awaitable[bool]]


class FaultInjector:
    """Acts on the processes of a server that listens on ``port``.

    ``engines_up`` says how many engines take requests: one always stays undisturbed, so nothing has to be
    refused. ``find`` is told what must not happen.
    """

    def __init__(
        self,
        processes: ProcessTree,
        port: int,
        rng: random.Random,
        hang_timeout_s: float,
        engines_up: Callable[[], Awaitable[int]],
        find: Callable[[str, str], None],
    ) -> None:
        self.done: Counter[str] = Counter()
        self.killed: set[ProcessInstance] = set()
        self.retired: set[ProcessInstance] = set()
        """Ended in order, as others took their place."""
        self.spared: frozenset[str] = frozenset()
        """Titles of processes that are left alone; API servers are not replaced then."""
        self._processes = processes
        self._port = port
        self._random = rng
        self._hang_timeout_s = hang_timeout_s
        self._engines_up = engines_up
        self._find = find
        self._cut: dict[int, float] = {}
        """Clients' ports of connections that ended with their API server, and when."""
        self._kinds: dict[str, tuple[Fault, int]] = {
            "kill engine": (self._kill_engine, 4),
            "hang engine": (self._hang_engine, 1),
            "pause engine": (self._pause_engine, 2),
            "kill API server": (self._kill_server, 3),
            "pause API server": (self._pause_server, 2),
            "kill coordinator": (self._kill_coordinator, 1),
            "replace API servers": (self._replace, 1),
        }

    def was_killed(self, attempt: SentRequest) -> bool:
        """Whether the API server of a request's connection was killed before it ended."""
        killed_at = self._cut.get(attempt.port)
        return killed_at is not None and attempt.opened_at <= killed_at <= attempt.ended_at

    async def run(self, every_s: float) -> None:
        """Until it is cancelled, about every so many seconds. What has begun is finished first."""
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(self._random.expovariate(1 / every_s))
                weights = [weight for _, weight in self._kinds.values()]
                await _whole(self.once(self._random.choices(list(self._kinds), weights)[0]))

    async def once(self, kind: str) -> bool:
        """One disturbance; False when it cannot be made as things are."""
        made = await self._kinds[kind][0]()
        self.done[kind] += made
        return made

    # -- kinds; each says whether it could be done

    async def _kill_engine(self) -> bool:
        victim = await self._engine()
        if victim is None:
            return False
        self._kill(*victim)
        return True

    async def _hang_engine(self) -> bool:
        """Longer than it may: it is to be killed and started again."""
        victim = await self._engine()
        if victim is None:
            return False
        incarnation, process = victim
        self.killed.add(incarnation)
        process.suspend()
        if not await _until(lambda: not is_alive(incarnation), self._hang_timeout_s + GONE_S):
            self._find("hung engine not replaced", f"{incarnation.title}, process {incarnation.pid}")
            self._kill(incarnation, process)
        return True

    async def _pause_engine(self) -> bool:
        return await self._pause(await self._engine())

    async def _pause_server(self) -> bool:
        return await self._pause(self._victim("api-server"))

    async def _pause(self, victim: tuple[ProcessInstance, psutil.Process] | None) -> bool:
        if victim is None:
            return False
        process = victim[1]
        process.suspend()
        try:
            await asyncio.sleep(self._random.uniform(*PAUSES_S))
        finally:
            process.resume()
        return True

    async def _kill_server(self) -> bool:
        """Stopped first, so that it accepts nothing after its connections have been noted."""
        victim = self._victim("api-server")
        if victim is None:
            return False
        incarnation, process = victim
        process.suspend()
        await _until(lambda: process.status() == psutil.STATUS_STOPPED, GONE_S)
        ports = client_ports(process, self._port)
        now = time.monotonic()
        self._cut = {port: at for port, at in self._cut.items() if now - at <= REMEMBERED_S}
        self._cut |= dict.fromkeys(ports, now)
        self._kill(incarnation, process)
        return True

    async def _kill_coordinator(self) -> bool:
        victim = self._victim("coordinator")
        if victim is None:
            return False
        self._kill(*victim)
        return True

    async def _replace(self) -> bool:
        """All API servers by new ones."""
        old = self._processes.with_role("api-server")
        if self.spared or not all(map(_settled, old)):
            return False
        self.retired |= set(old)
        self._processes.supervisor.send_signal(signal.SIGHUP)
        return True

    # -- victims

    async def _engine(self) -> tuple[ProcessInstance, psutil.Process] | None:
        """One of several that are up."""
        if await self._engines_up() < 2:
            return None
        return self._victim("engine")

    def _victim(self, role: str) -> tuple[ProcessInstance, psutil.Process] | None:
        """A process of this role, unless one is just being replaced."""
        candidates = [each for each in self._processes.with_role(role) if each.title not in self.spared]
        if not candidates or any(map(is_alive, self.retired)) or not all(map(_settled, candidates)):
            return None
        incarnation = self._random.choice(candidates)
        process = process_of(incarnation)
        return None if process is None else (incarnation, process)

    def _kill(self, incarnation: ProcessInstance, process: psutil.Process) -> None:
        self.killed.add(incarnation)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _settled(incarnation: ProcessInstance) -> bool:
    return time.time() - incarnation.created >= SETTLED_S


async def _until(condition: Callable[[], bool], seconds: float) -> bool:
    """Waits until it holds; False when it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(POLL_S)
    return True


async def _whole(work: Awaitable[object]) -> None:
    """Finish ``work`` before a cancellation takes effect."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
