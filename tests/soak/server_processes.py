"""The processes of the server under test, as the operating system shows them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

import psutil

TITLE = "penstock: "


class ProcessInstance(NamedTuple):
    """One process. A restarted process is another instance."""

    title: str
    """api-server 0, engine 2, coordinator 0, supervisor."""
    pid: int
    created: float

    @property
    def role(self) -> str:
        return self.title.partition(" ")[0]


class ProcessTree:
    """The supervisor ``pid`` and its children."""

    def __init__(self, pid: int) -> None:
        self._supervisor = psutil.Process(pid)
        self.seen: set[ProcessInstance] = set()

    @property
    def supervisor(self) -> psutil.Process:
        return self._supervisor

    def alive(self) -> list[ProcessInstance]:
        """All running processes that have set their title, but for the one whose forks they are."""
        found = []
        for process in [self._supervisor, *self._supervisor.children()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                title = " ".join(process.cmdline()).strip()
                if title.startswith(TITLE):
                    found.append(
                        ProcessInstance(title.removeprefix(TITLE).strip(), process.pid, process.create_time())
                    )
        self.seen |= set(found)
        return sorted(each for each in found if each.role != "template")

    def with_role(self, role: str) -> list[ProcessInstance]:
        return [each for each in self.alive() if each.role == role]

    def left_over(self) -> list[ProcessInstance]:
        """All processes ever seen that still run."""
        return [each for each in sorted(self.seen) if is_alive(each)]


def process_of(instance: ProcessInstance) -> psutil.Process | None:
    """None when it has exited."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(instance.pid)
        if process.create_time() == instance.created and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


def is_alive(instance: ProcessInstance) -> bool:
    return process_of(instance) is not None


def client_ports(process: psutil.Process, port: int) -> set[int]:
    """The client ports of a process's connections on ``port``."""
    return {
        connection.raddr.port
        for connection in process.net_connections("tcp")
        if connection.raddr and connection.laddr.port == port
    }


def files_below(directory: Path) -> int:
    """Number of files, sockets and directories."""
    return sum(1 for _ in directory.rglob("*"))
