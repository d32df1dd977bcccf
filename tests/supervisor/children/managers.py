"""Process managers in known states, and filters for their actions."""

from __future__ import annotations

import logging

from penstock.supervisor.children.actions import Action, ProcessName, Send, WriteLog
from penstock.supervisor.children.lifecycle import Phase
from penstock.supervisor.children.process_manager import ChildTimes, Fleet, ProcessManager
from penstock.wire.control import AcceptConnections, EnableThroughputLog, Ready

ENGINE = ProcessName("engine", 0)
SERVER = ProcessName("api-server", 0)
OTHER = ProcessName("api-server", 1)
STARTUP_S = 100.0
DRAIN_S = 7.0
HANG_S = 20.0


def make(
    api_servers: int = 1,
    hang_timeout: float = 0,
    group: int = 0,
    *,
    engines: int = 1,
    coordinator: bool = False,
    media_workers: int = 0,
    first_rank: int = 0,
    all_engines: int | None = None,
    drain_grace: float = 0.0,
    server_hang_timeout: float = 0,
    serves_with_one_engine: bool = False,
) -> ProcessManager:
    """With ``engines``, or an expert-parallel ``group`` of so many."""
    return ProcessManager(
        Fleet(
            engines=group or engines,
            api_servers=api_servers,
            coordinator=coordinator,
            media_workers=media_workers,
            expert_parallel=group > 0,
            first_rank=first_rank,
            all_engines=all_engines,
            serves_with_one_engine=serves_with_one_engine,
        ),
        ChildTimes(
            startup_timeout=STARTUP_S,
            drain_timeout=DRAIN_S,
            drain_grace=drain_grace,
            engine_hang_timeout=hang_timeout,
            api_server_hang_timeout=server_hang_timeout,
        ),
    )


def ready(manager: ProcessManager) -> ProcessManager:
    """Starts all children at time 0; they are ready at time 1."""
    manager.start(0.0)
    for name in manager.names():
        manager.report(name, Ready(), 1.0)
    assert manager.phase is Phase.SERVING
    return manager


def serving(api_servers: int = 1, hang_timeout: float = 0, group: int = 0) -> ProcessManager:
    return ready(make(api_servers, hang_timeout, group))


def watched(manager: ProcessManager, since: float, until: float) -> list[Action]:
    """Actions of a supervisor that calls tick at every deadline between ``since`` and ``until``, and then."""
    actions: list[Action] = []
    now = since
    while (deadline := manager.next_deadline()) is not None and deadline < until and now < until:
        now = max(now, deadline)
        actions += manager.tick(now)
    return actions + manager.tick(until)


def said(actions: list[Action]) -> list[str]:
    return [action.text for action in actions if isinstance(action, WriteLog)]


def errors(actions: list[Action]) -> list[str]:
    return [a.text for a in actions if isinstance(a, WriteLog) and a.level >= logging.WARNING]


def done(actions: list[Action]) -> list[Action]:
    """Actions that have nothing to do with the log, without those of every API server that is ready."""
    usual = (EnableThroughputLog(), AcceptConnections())
    return [
        a for a in actions if not isinstance(a, WriteLog) and not (isinstance(a, Send) and a.command in usual)
    ]


def fail_for_good(manager: ProcessManager, name: ProcessName, now: float) -> tuple[list[Action], float]:
    """Exits, and fails to start until it is given up; returns the actions of the last failure, and its
    time."""
    manager.exited(name, 1, now)
    for _ in range(2):
        now += 40.0
        assert done(manager.tick(now)) != []
        manager.exited(name, 1, now)
    now += 40.0
    manager.tick(now)
    return manager.exited(name, 1, now), now
