"""Random faults of a server's processes, one at a time: kills, hangs, pauses, rolling restarts."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import psutil

from tests.soak.exchange import SentRequest
from tests.soak.server_processes import ProcessInstance, ProcessTree, client_ports, is_alive, process_of

PAUSES_S = (0.2, 2.0)
"""Shortest and longest pause of a process."""
SETTLED_S = 8.0
"""Minimum age of a process for a fault: it is ready then. Killing a starting process fails its start, and
three failed starts end the server."""
GONE_S = 30.0
"""Time limit for immediate actions of the system or the supervisor, on a busy machine."""
REMEMBERED_S = 300.0
"""Time in which a client may notice a kill: longer than any request."""
POLL_S = 0.05

Fault = Callable[[], Awaitable[bool]]


class FaultInjector:
    """Injects faults into the processes of a server that listens on ``port``.

    ``engines_up`` returns the number of ready engines: one is always left alone, so that no request is
    refused. ``find`` records a defect.
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
        self.hung: set[ProcessInstance] = set()
        """Those of ``killed`` that stood still before, until the supervisor noticed."""
        self.retired: set[ProcessInstance] = set()
        """Replaced in a rolling restart."""
        self.spared: frozenset[str] = frozenset()
        """Titles of processes without faults. While there are any, there is no rolling restart."""
        self._processes = processes
        self._port = port
        self._random = rng
        self._hang_timeout_s = hang_timeout_s
        self._engines_up = engines_up
        self._find = find
        self.front: psutil.Process | None = None
        """The gateway in front of the server. Its clients then have no connection to an API server, whose end
        they could not tell from a fault: API servers are only paused."""
        self._cut: dict[int, float] = {}
        """Client ports of connections whose API server was killed, with the time."""
        self._kinds: dict[str, tuple[Fault, int]] = {
            "kill engine": (self._kill_engine, 4),
            "hang engine": (self._hang_engine, 1),
            "pause engine": (self._pause_engine, 2),
            "kill API server": (self._kill_server, 3),
            "hang API server": (self._hang_server, 1),
            "pause API server": (self._pause_server, 2),
            "kill coordinator": (self._kill_coordinator, 1),
            "hang coordinator": (self._hang_coordinator, 1),
            "pause coordinator": (self._pause_coordinator, 1),
            "pause supervisor": (self._pause_supervisor, 1),
            "pause gateway": (self._pause_gateway, 2),
            "replace API servers": (self._replace, 1),
        }

    def was_killed(self, attempt: SentRequest) -> bool:
        """Whether the API server of a request's connection was killed before it ended."""
        killed_at = self._cut.get(attempt.port)
        return killed_at is not None and attempt.opened_at <= killed_at <= attempt.ended_at

    async def run(self, every_s: float) -> None:
        """Injects faults, ``every_s`` seconds apart on average, until cancelled; completes the last."""
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(self._random.expovariate(1 / every_s))
                weights = [weight for _, weight in self._kinds.values()]
                await _whole(self.once(self._random.choices(list(self._kinds), weights)[0]))

    async def once(self, kind: str) -> bool:
        """Injects one fault; False when it is impossible at the moment."""
        made = await self._kinds[kind][0]()
        self.done[kind] += made
        return made

    # -- kinds of faults; False: impossible at the moment

    async def _kill_engine(self) -> bool:
        victim = await self._engine()
        if victim is None:
            return False
        self._kill(*victim)
        return True

    async def _hang_engine(self) -> bool:
        return await self._hang(await self._engine())

    async def _hang_server(self) -> bool:
        victim = self._served_directly("api-server")
        if victim is not None:
            await self._remember_clients(victim[1])
        return await self._hang(victim)

    async def _hang_coordinator(self) -> bool:
        return await self._hang(self._victim("coordinator"))

    async def _hang(self, victim: tuple[ProcessInstance, psutil.Process] | None) -> bool:
        """For longer than the hang timeout: it must be killed and restarted."""
        if victim is None:
            return False
        instance, process = victim
        self.killed.add(instance)
        self.hung.add(instance)
        process.suspend()
        if not await _until(lambda: not is_alive(instance), self._hang_timeout_s + GONE_S):
            self._find(f"hung {instance.role} not replaced", f"{instance.title}, process {instance.pid}")
            self._kill(instance, process)
        return True

    async def _pause_engine(self) -> bool:
        return await self._pause(await self._engine())

    async def _pause_server(self) -> bool:
        return await self._pause(self._victim("api-server"))

    async def _pause_coordinator(self) -> bool:
        return await self._pause(self._victim("coordinator"))

    async def _pause_supervisor(self) -> bool:
        return await self._pause_process(self._processes.supervisor)

    async def _pause_gateway(self) -> bool:
        return self.front is not None and await self._pause_process(self.front)

    async def _pause(self, victim: tuple[ProcessInstance, psutil.Process] | None) -> bool:
        return victim is not None and await self._pause_process(victim[1])

    async def _pause_process(self, process: psutil.Process) -> bool:
        process.suspend()
        try:
            await asyncio.sleep(self._random.uniform(*PAUSES_S))
        finally:
            process.resume()
        return True

    async def _kill_server(self) -> bool:
        """Stopped first, so that it accepts no connection after its client ports are read."""
        victim = self._served_directly("api-server")
        if victim is None:
            return False
        instance, process = victim
        await self._remember_clients(process)
        self._kill(instance, process)
        return True

    async def _remember_clients(self, process: psutil.Process) -> None:
        """Stops the process, and remembers the clients that it has then: they lose it."""
        process.suspend()
        await _until(lambda: process.status() == psutil.STATUS_STOPPED, GONE_S)
        ports = client_ports(process, self._port)
        now = time.monotonic()
        self._cut = {port: at for port, at in self._cut.items() if now - at <= REMEMBERED_S}
        self._cut |= dict.fromkeys(ports, now)

    async def _kill_coordinator(self) -> bool:
        victim = self._victim("coordinator")
        if victim is None:
            return False
        self._kill(*victim)
        return True

    async def _replace(self) -> bool:
        """Starts a rolling restart of the API servers."""
        old = self._processes.with_role("api-server")
        if self.front is not None or self.spared or not all(map(_settled, old)):
            return False
        self.retired |= set(old)
        self._processes.supervisor.send_signal(signal.SIGHUP)
        return True

    # -- victims

    async def _engine(self) -> tuple[ProcessInstance, psutil.Process] | None:
        """An engine, unless it is the only one that is up."""
        if await self._engines_up() < 2:
            return None
        return self._victim("engine")

    def _served_directly(self, role: str) -> tuple[ProcessInstance, psutil.Process] | None:
        return self._victim(role) if self.front is None else None

    def _victim(self, role: str) -> tuple[ProcessInstance, psutil.Process] | None:
        """A random process of this role; None while one is being replaced."""
        candidates = [each for each in self._processes.with_role(role) if each.title not in self.spared]
        if not candidates or any(map(is_alive, self.retired)) or not all(map(_settled, candidates)):
            return None
        instance = self._random.choice(candidates)
        process = process_of(instance)
        return None if process is None else (instance, process)

    def _kill(self, instance: ProcessInstance, process: psutil.Process) -> None:
        self.killed.add(instance)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _settled(instance: ProcessInstance) -> bool:
    return time.time() - instance.created >= SETTLED_S


async def _until(condition: Callable[[], bool], seconds: float) -> bool:
    """Waits until ``condition`` holds; False after ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(POLL_S)
    return True


async def _whole(work: Awaitable[object]) -> None:
    """Completes ``work`` before a cancellation takes effect."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
