"""State that every API server must know: drained engines, agreed states, and which one logs the throughput.

API servers get each change when it happens, and everything when they become ready.
"""

from __future__ import annotations

import logging

import msgspec

from penstock.supervisor.children.actions import ProcessName
from penstock.supervisor.children.agreed_state_store import AgreedStateStore
from penstock.supervisor.children.child_state import Child, ChildState, ChildTable
from penstock.wire.adapter_list import ADAPTERS, AdapterList
from penstock.wire.control import (
    DrainEngine,
    EnableThroughputLog,
    EnginesDraining,
    ProposeState,
    SupervisorCommand,
)

NAMES_SHOWN = 8
"""Adapters that a log line names."""


class ApiServerBroadcast:
    """Answers API servers' requests and sends their results to all. ``all_engines`` counts engines of all
    hosts."""

    def __init__(self, children: ChildTable, all_engines: int, agreed_states: AgreedStateStore) -> None:
        self._children = children
        self._all_engines = all_engines
        # Ranks of the engines that get no new streams.
        self._draining: set[int] = set()
        self._agreed_states = agreed_states
        self._throughput_logger: ProcessName | None = None

    def send_current_state(self, server: Child) -> None:
        """To an API server that has become ready."""
        if self._draining:
            self._children.send(server, self._engines_draining())
        if self._agreed_states.agreed.revision:
            self._children.send(server, self._agreed_states.agreed)

    def drain_engine(self, child: Child, report: DrainEngine) -> None:
        """An API server asks that an engine get no new streams, or get them again."""
        if report.rank >= self._all_engines:
            text = f"{child.name} asked for engine {report.rank}, which does not exist"
            self._children.log_rarely(logging.WARNING, f"unknown engine of {child.name}", text)
            return
        if report.draining == (report.rank in self._draining):
            self._children.send(child, self._engines_draining())
            return
        change = self._draining.add if report.draining else self._draining.discard
        change(report.rank)
        how = "gets no new streams" if report.draining else "gets new streams again"
        text = f"engine {report.rank} {how}"
        self._children.log_rarely(logging.INFO, text, text)
        self._send_to_all(self._engines_draining())

    def propose(self, child: Child, change: ProposeState) -> None:
        """Decides a change that all engines have prepared. The sender of one that is outdated gets the agreed
        states."""
        if self._agreed_states.propose(change):
            text = f"agreed by all engines: {change.name} ({_shown(change)})"
            self._children.log_rarely(logging.INFO, text, text)
            self._send_to_all(self._agreed_states.agreed)
        else:
            self._children.send(child, self._agreed_states.agreed)

    def confirm(self, server: ProcessName, revision: int) -> None:
        """An API server has applied a revision of the agreed states."""
        self._agreed_states.confirm(server, revision)
        self._advance_adopted()

    def forget(self, server: ProcessName) -> None:
        """A child has exited: nobody waits for its confirmation, and another one logs the throughput."""
        self._agreed_states.forget(server)
        self._advance_adopted()
        if server == self._throughput_logger:
            self._throughput_logger = None
            self.choose_throughput_logger()

    def choose_throughput_logger(self) -> None:
        """Chooses an API server that gets new connections, unless there is none or one is chosen already."""
        ready = [child.name for child in self._children.with_role("api-server", ChildState.READY)]
        if ready and self._throughput_logger not in ready:
            self._throughput_logger = ready[0]
            self._children.send(self._children[self._throughput_logger], EnableThroughputLog())

    def _advance_adopted(self) -> None:
        if self._agreed_states.advance_adopted([child.name for child in self._serving()]):
            self._send_to_all(self._agreed_states.agreed)

    def _engines_draining(self) -> EnginesDraining:
        return EnginesDraining(ranks=sorted(self._draining))

    def _send_to_all(self, command: SupervisorCommand) -> None:
        for server in self._serving():
            self._children.send(server, command)

    def _serving(self) -> list[Child]:
        """API servers that may have clients."""
        return self._children.with_role("api-server", ChildState.READY, ChildState.RETIRING)


def _shown(change: ProposeState) -> str:
    """What a change is to, for the log: of adapters the names."""
    if change.name == ADAPTERS:
        names = [adapter.name for adapter in msgspec.convert(change.arguments, AdapterList).adapters]
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        return (", ".join(names[:NAMES_SHOWN]) + more) or "none"
    return ", ".join(f"{name} {value}" for name, value in change.arguments.items())
