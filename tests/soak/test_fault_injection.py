"""Disturbances of real processes that only look like a server's."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import pytest

from tests.soak import fault_injection
from tests.soak.exchange import SentRequest
from tests.soak.fault_injection import FaultInjector
from tests.soak.server_processes import ProcessInstance, ProcessTree, is_alive

PATIENCE_S = 60.0
PARENT = """
import os, subprocess, sys, time
from setproctitle import setproctitle
listening = int(sys.argv[1])
for title in sys.argv[2:]:
    code = ("import sys, time, socket; from setproctitle import setproctitle; setproctitle(sys.argv[1]); "
            "s = socket.socket(fileno=int(sys.argv[2])); "
            "kept = s.accept() if 'api' in sys.argv[1] else None; print(flush=True); time.sleep(600)")
    subprocess.Popen([sys.executable, "-c", code, "penstock: " + title, str(listening)], pass_fds=[listening])
setproctitle("penstock: supervisor")
print(flush=True)
time.sleep(600)
"""


@dataclass
class Fake:
    """A supervisor of sleeping children. Each writes a line when it has its title, and the API server when it
    has also accepted one connection."""

    processes: ProcessTree
    port: int
    client: socket.socket
    engines_up: int = 2

    def with_role(self, role: str) -> list[ProcessInstance]:
        return self.processes.with_role(role)


TITLES = ("api-server 0", "coordinator 0", "engine 0", "engine 1")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.setattr(fault_injection, "SETTLED_S", 0.0)
    monkeypatch.setattr(fault_injection, "PAUSES_S", (0.01, 0.02))
    listener = socket.create_server(("127.0.0.1", 0))
    fd = listener.fileno()
    command = [sys.executable, "-c", PARENT, str(fd), *TITLES]
    parent = subprocess.Popen(command, pass_fds=[fd], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    client = socket.create_connection(listener.getsockname())
    processes = ProcessTree(parent.pid)
    try:
        for _ in ("supervisor", *TITLES):
            assert parent.stdout.readline() == b"\n"
        assert len(processes.alive()) == 1 + len(TITLES)
        yield Fake(processes, listener.getsockname()[1], client)
    finally:
        for each in processes.left_over():
            psutil.Process(each.pid).kill()
        parent.kill()
        parent.wait()
        parent.stdout.close()
        client.close()
        listener.close()


def disturber(fake: Fake, seed: int = 0) -> tuple[FaultInjector, list[str]]:
    found: list[str] = []

    async def engines_up() -> int:
        return fake.engines_up

    made = FaultInjector(
        fake.processes,
        fake.port,
        random.Random(seed),
        0.05,
        engines_up,
        lambda kind, text: found.append(kind),
    )
    return made, found


def until(condition: Callable[[], bool]) -> None:
    """Polls: who is killed here is another process's child, for which there is nothing to wait on."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_killed_api_servers_clients_are_known(fake: Fake) -> None:
    made, _ = disturber(fake)
    mine = SentRequest(fake.client.getsockname()[1], time.monotonic(), reused=False)
    other = SentRequest(mine.port + 1, mine.opened_at, reused=False)
    (server,) = fake.with_role("api-server")
    early = SentRequest(mine.port, mine.opened_at, reused=False)
    early.ended_at = time.monotonic()
    assert asyncio.run(made.once("kill API server"))
    until(lambda: not is_alive(server))
    again = SentRequest(mine.port, time.monotonic(), reused=False)
    for each in (mine, other, again):
        each.ended_at = time.monotonic()
    assert made.was_killed(mine)
    assert not any(map(made.was_killed, (early, other, again)))
    assert made.killed == {server}


def test_engines_are_killed_while_another_is_up(fake: Fake) -> None:
    made, _ = disturber(fake)
    engines = fake.with_role("engine")
    fake.engines_up = 1
    assert not asyncio.run(made.once("kill engine"))
    assert all(map(is_alive, engines))
    fake.engines_up = 2
    assert asyncio.run(made.once("kill engine"))
    until(lambda: sum(map(is_alive, engines)) == 1)
    assert made.done == {"kill engine": 1}


@pytest.mark.parametrize("role", ["API server", "coordinator"])
def test_a_process_that_hangs_and_is_not_replaced_is_found(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    monkeypatch.setattr(fault_injection, "GONE_S", 0.1)
    made, found = disturber(fake)
    mine = SentRequest(fake.client.getsockname()[1], time.monotonic(), reused=False)
    assert asyncio.run(made.once(f"hang {role}"))
    assert found == [f"hung {role.lower().replace(' ', '-')} not replaced"]
    until(lambda: len(fake.processes.alive()) == len(TITLES))
    mine.ended_at = time.monotonic()
    assert made.was_killed(mine) == (role == "API server")


def test_behind_a_gateway_api_servers_are_only_paused(fake: Fake) -> None:
    made, _ = disturber(fake)
    made.front = psutil.Process()
    for kind in ("kill API server", "hang API server", "replace API servers"):
        assert not asyncio.run(made.once(kind))
    assert len(fake.with_role("api-server")) == 1


def test_what_is_spared_is_left_alone(fake: Fake) -> None:
    made, _ = disturber(fake)
    made.spared = frozenset(("engine 1", "api-server 0", "coordinator 0"))
    for kind in ("kill API server", "pause API server", "kill coordinator", "replace API servers"):
        assert not asyncio.run(made.once(kind))
    assert asyncio.run(made.once("kill engine"))
    until(lambda: [each.title for each in fake.with_role("engine")] == ["engine 1"])


def test_pauses_end(fake: Fake) -> None:
    made, _ = disturber(fake)
    for kind in ("pause engine", "pause API server", "pause coordinator", "pause supervisor"):
        assert asyncio.run(made.once(kind))
    stopped = [each for each in fake.processes.alive() if psutil.Process(each.pid).status() == "stopped"]
    assert stopped == []
    assert not made.killed


def test_an_engine_that_hangs_and_is_not_replaced_is_found(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault_injection, "GONE_S", 0.1)
    made, found = disturber(fake)
    assert asyncio.run(made.once("hang engine"))
    assert found == ["hung engine not replaced"]
    until(lambda: len(fake.with_role("engine")) == 1)


def test_api_servers_are_replaced_by_a_signal(fake: Fake) -> None:
    made, _ = disturber(fake)
    (server,) = fake.with_role("api-server")
    assert asyncio.run(made.once("replace API servers"))
    assert made.retired == {server}
    assert fake.processes.supervisor.wait(PATIENCE_S) == -signal.SIGHUP
