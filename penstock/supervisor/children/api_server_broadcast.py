"""State that every API server must know: drained engines, desired states, and which one logs the throughput.

API servers get each change when it happens, and everything when they become ready.
"""

from __future__ import annotations

import logging

import msgspec

from penstock.supervisor.children.actions import ProcessName
from penstock.supervisor.children.child_state import Child, ChildState, ChildTable
from penstock.supervisor.children.desired_state_store import DesiredStateStore
from penstock.wire.adapter_list import ADAPTERS, AdapterList
from penstock.wire.control import (
    ChangeState,
    DrainEngine,
    EnableThroughputLog,
    EnginesDraining,
    StatesReport,
    SupervisorCommand,
)
from penstock.wire.messages import WEIGHTS
from penstock.wire.weights.desired import DesiredWeights

NAMES_SHOWN = 8
"""Adapters that a log line names."""


class ApiServerBroadcast:
    """Answers API servers' requests and sends their results to all. ``all_engines`` counts engines of all
    hosts."""

    def __init__(self, children: ChildTable, all_engines: int, desired_states: DesiredStateStore) -> None:
        self._children = children
        self._all_engines = all_engines
        self._draining: set[int] = set()
        """Ranks of the engines that get no new streams."""
        self._desired_states = desired_states
        self._throughput_logger: ProcessName | None = None

    def send_current_state(self, server: Child) -> None:
        """To an API server that has become ready."""
        if self._draining:
            self._children.send(server, self._engines_draining())
        desired = self._desired_states.table()
        if desired.states:
            self._children.send(server, desired)

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

    def change_state(self, child: Child, change: ChangeState) -> None:
        """Set a state. The sender of a change that is not made gets what is desired instead."""
        if self._desired_states.change(child.name, change):
            text = f"{change.name} is set to: {_shown(change)}"
            self._children.log_rarely(logging.INFO, text, text)
            self._send_to_all(self._desired_states.table())
        else:
            self._children.send(child, self._desired_states.table())

    def on_states_report(self, server: ProcessName, report: StatesReport) -> None:
        """An API server tells what it and its engines have reached."""
        self._desired_states.report(server, report.states)
        self._advance_states()

    def forget(self, server: ProcessName) -> None:
        """A child has exited: nobody waits for what it has not observed, what it asked for and is pending is
        set back, and another one logs the throughput."""
        self._desired_states.forget(server)
        self._advance_states()
        if server == self._throughput_logger:
            self._throughput_logger = None
            self.choose_throughput_logger()

    def choose_throughput_logger(self) -> None:
        """Choose an API server that gets new connections, unless there is none or one is chosen already."""
        ready = [child.name for child in self._children.with_role("api-server", ChildState.READY)]
        if ready and self._throughput_logger not in ready:
            self._throughput_logger = ready[0]
            self._children.send(self._children[self._throughput_logger], EnableThroughputLog())

    def _advance_states(self) -> None:
        """Settle what everybody has reached, and set back what somebody cannot reach."""
        changed, failures = self._desired_states.advance([child.name for child in self._serving()])
        for text in failures:
            self._children.log_rarely(logging.WARNING, text, text)
        if changed:
            self._send_to_all(self._desired_states.table())

    def _engines_draining(self) -> EnginesDraining:
        return EnginesDraining(ranks=sorted(self._draining))

    def _send_to_all(self, command: SupervisorCommand) -> None:
        for server in self._serving():
            self._children.send(server, command)

    def _serving(self) -> list[Child]:
        """API servers that may have clients."""
        return self._children.with_role("api-server", ChildState.READY, ChildState.RETIRING)


def _shown(change: ChangeState) -> str:
    """What a change is to, for the log: of adapters the names, of weights the version."""
    if change.name == ADAPTERS:
        names = [adapter.name for adapter in msgspec.convert(change.stages[-1], AdapterList).adapters]
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        return (", ".join(names[:NAMES_SHOWN]) + more) or "none"
    if change.name == WEIGHTS:
        weights = msgspec.convert(change.stages[-1], DesiredWeights)
        *earlier, last = weights.sources
        added = f", added to {len(earlier)} before" if earlier and last.is_part else ""
        return f"version {weights.version} from {last.path}{added}"
    return ", ".join(f"{name} {value}" for name, value in change.stages[-1].items())
