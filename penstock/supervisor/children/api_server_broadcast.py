"""What API servers are told of the engines, each and whenever it starts, and which one speaks in the log."""

from __future__ import annotations

import logging

from penstock.supervisor.children.actions import ProcessName
from penstock.supervisor.children.agreed_state_store import AgreedStateStore
from penstock.supervisor.children.child_state import Child, ChildState, ChildTable
from penstock.wire.control import (
    DrainEngine,
    EnableThroughputLog,
    EnginesDraining,
    ProposeState,
    SupervisorCommand,
)


class ApiServerBroadcast:
    """Which engines get no new streams, the states that all engines agree on, and who speaks.

    ``all_engines`` counts those of all hosts.
    """

    def __init__(self, children: ChildTable, all_engines: int) -> None:
        self._children = children
        self._all_engines = all_engines
        # Ranks of the engines that get no new streams.
        self._draining: set[int] = set()
        self._agreed_states = AgreedStateStore()
        self._throughput_logger: ProcessName | None = None

    def send_current_state(self, server: Child) -> None:
        """Everything there is to know, to an API server that has become ready."""
        if self._draining:
            self._children.send(server, self._engines_draining())
        if self._agreed_states.agreed.revision:
            self._children.send(server, self._agreed_states.agreed)

    def drain_engine(self, child: Child, report: DrainEngine) -> None:
        """An API server asked for it; those that start are told when they are ready."""
        if report.rank >= self._all_engines:
            told = f"{child.name} asked for engine {report.rank}, which there is not"
            self._children.log(logging.ERROR, told)
            return
        change = self._draining.add if report.draining else self._draining.discard
        change(report.rank)
        how = "no longer" if report.draining else "again"
        self._children.log(logging.INFO, f"engine {report.rank} gets new streams {how}")
        self._send_to_all(self._engines_draining())

    def propose(self, child: Child, change: ProposeState) -> None:
        """Decides a change that all engines have prepared; one that comes too late is told what is agreed."""
        if self._agreed_states.propose(change):
            self._children.log(logging.INFO, f"agreed: {change.name} {change.arguments}")
            self._send_to_all(self._agreed_states.agreed)
        else:
            self._children.send(child, self._agreed_states.agreed)

    def adopted(self, server: ProcessName, revision: int) -> None:
        """An API server acts by a revision of what is agreed."""
        self._agreed_states.confirm(server, revision)
        self._advance_adopted()

    def forget(self, server: ProcessName) -> None:
        """It is gone, and not waited for."""
        self._agreed_states.forget(server)
        self._advance_adopted()
        if server == self._throughput_logger:
            self._throughput_logger = None
            self.choose_throughput_logger()

    def choose_throughput_logger(self) -> None:
        """One that gets new connections, unless there is none or one speaks already."""
        ready = [child.name for child in self._children.with_role("api-server", ChildState.READY)]
        if ready and self._throughput_logger not in ready:
            self._throughput_logger = ready[0]
            self._children.send(self._children[self._throughput_logger], EnableThroughputLog())

    def _advance_adopted(self) -> None:
        if self._agreed_states.advance_adopted([child.name for child in self._serving()]):
            self._send_to_all(self._agreed_states.agreed)

    def _engines_draining(self) -> EnginesDraining:
        return EnginesDraining(ranks=sorted(self._draining))

    def _send_to_all(self, order: SupervisorCommand) -> None:
        for server in self._serving():
            self._children.send(server, order)

    def _serving(self) -> list[Child]:
        """API servers that may have clients; those that start are told everything when they are ready."""
        return self._children.with_role("api-server", ChildState.READY, ChildState.RETIRING)
