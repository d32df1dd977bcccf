"""Fleets in known states, and what there is to read in their actions."""

from __future__ import annotations

import logging

from penstock.supervisor.children.actions import Action, ProcessName, Send, WriteLog
from penstock.supervisor.children.lifecycle import Phase
from penstock.supervisor.children.process_manager import ProcessManager
from penstock.wire.control import EnableThroughputLog, Ready

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
    first_rank: int = 0,
    all_engines: int | None = None,
) -> ProcessManager:
    """With ``engines``, or a ``group`` of so many in lock-step."""
    return ProcessManager(
        engines=group or engines,
        api_servers=api_servers,
        startup_timeout=STARTUP_S,
        drain_timeout=DRAIN_S,
        engine_hang_timeout=hang_timeout,
        coordinator=coordinator,
        lockstep=group > 0,
        first_rank=first_rank,
        all_engines=all_engines,
    )


def ready(fleet: ProcessManager) -> ProcessManager:
    """Started at time 0, and all are ready at time 1."""
    fleet.start(0.0)
    for name in fleet.names():
        fleet.report(name, Ready(), 1.0)
    assert fleet.phase is Phase.SERVING
    return fleet


def serving(api_servers: int = 1, hang_timeout: float = 0, group: int = 0) -> ProcessManager:
    return ready(make(api_servers, hang_timeout, group))


def watched(fleet: ProcessManager, since: float, until: float) -> list[Action]:
    """What a supervisor that looks as often as it should does after ``since`` and before ``until``, then."""
    actions: list[Action] = []
    now = since
    while (deadline := fleet.next_deadline()) is not None and deadline < until and now < until:
        now = max(now, deadline)
        actions += fleet.tick(now)
    return actions + fleet.tick(until)


def said(actions: list[Action]) -> list[str]:
    return [action.text for action in actions if isinstance(action, WriteLog)]


def errors(actions: list[Action]) -> list[str]:
    return [a.text for a in actions if isinstance(a, WriteLog) and a.level >= logging.WARNING]


def done(actions: list[Action]) -> list[Action]:
    """What has nothing to do with the log."""
    return [
        a
        for a in actions
        if not isinstance(a, WriteLog) and not (isinstance(a, Send) and a.order == EnableThroughputLog())
    ]


def fail_for_good(fleet: ProcessManager, name: ProcessName, now: float) -> tuple[list[Action], float]:
    """Dies, and fails to start until that is given up; returns what the last failure led to, and when."""
    fleet.exited(name, 1, now)
    for _ in range(2):
        now += 40.0
        assert done(fleet.tick(now)) != []
        fleet.exited(name, 1, now)
    now += 40.0
    fleet.tick(now)
    return fleet.exited(name, 1, now), now
