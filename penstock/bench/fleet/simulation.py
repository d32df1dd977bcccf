"""Runs a trace through a simulated fleet with one policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

import numpy as np
from numpy.typing import NDArray

from penstock.bench.fleet.policies import Policy, ReportedLoad
from penstock.bench.fleet.simulated_server import ServerModel, SimulatedRequest, SimulatedServer
from penstock.bench.fleet.traces import TraceConversation

CHECKED_EVENTS = 1000
"""Events between two looks at the time limit; a simulation may have millions."""


@dataclass(slots=True)
class FleetResult:
    """What the clients of a fleet saw."""

    ttft_s: NDArray[np.float64]
    """Time to first token of every turn, in seconds."""
    cached_share: float
    """Prompt tokens that a prefix cache had, of all."""
    busiest: float
    """Turns at the busiest server, as a multiple of the mean."""


@dataclass(slots=True)
class _Turns:
    """The turns of one conversation that have not been sent."""

    conversation: TraceConversation
    sent: int = 0


@dataclass(slots=True)
class Simulation:
    """Events in order of time: turns are sent, steps end, metrics are scraped."""

    policy: Policy
    servers: list[SimulatedServer]
    check: Callable[[], object]
    """Called now and then; raises when the time is over."""
    _events: list[tuple[float, int, str, object]] = field(default_factory=list)
    _number: count[int] = field(default_factory=count)
    _open: dict[int, _Turns] = field(default_factory=dict)
    _ended: list[SimulatedRequest] = field(default_factory=list)

    def run(self, trace: Sequence[TraceConversation]) -> FleetResult:
        for conversation in trace:
            self._open[conversation.id] = _Turns(conversation)
            self._at(conversation.starts_at_s, "send", conversation.id)
        if self.policy.scrape_interval_s:
            self._at(0.0, "scrape", None)
        while self._open:
            now, number, kind, about = heappop(self._events)
            if number % CHECKED_EVENTS == 0:
                self.check()
            if kind == "send":
                assert isinstance(about, int)
                self._send(about, now)
            elif kind == "step":
                assert isinstance(about, int)
                self._end_step(about, now)
            else:
                self._scrape(now)
        return self._result()

    def _at(self, at: float, kind: str, about: object) -> None:
        heappush(self._events, (at, next(self._number), kind, about))

    def _send(self, id: int, now: float) -> None:
        turns = self._open[id]
        request = SimulatedRequest(turns.conversation.turns[turns.sent], now, id)
        turns.sent += 1
        request.server = self.policy.pick(request, now)
        server = self.servers[request.server]
        server.submit(request)
        if not server.busy:
            self._begin_step(request.server, now)

    def _begin_step(self, row: int, now: float) -> None:
        took = self.servers[row].begin_step()
        if took is not None:
            self._at(now + took, "step", row)

    def _end_step(self, row: int, now: float) -> None:
        for request in self.servers[row].end_step(now):
            self.policy.on_end(request, now)
            self._ended.append(request)
            turns = self._open[request.conversation]
            if turns.sent < len(turns.conversation.turns):
                self._at(now + request.turn.think_s, "send", request.conversation)
            else:
                del self._open[request.conversation]
        self._begin_step(row, now)

    def _scrape(self, now: float) -> None:
        for row, server in enumerate(self.servers):
            self.policy.on_scrape(row, ReportedLoad(server.waiting, server.running, server.kv_used), now)
        self._at(now + self.policy.scrape_interval_s, "scrape", None)

    def _result(self) -> FleetResult:
        ttft = np.array([each.first_token_at - each.sent_at for each in self._ended])
        cached = sum(each.cached_tokens for each in self._ended)
        turns = np.bincount([each.server for each in self._ended], minlength=len(self.servers))
        return FleetResult(
            ttft_s=ttft,
            cached_share=cached / sum(each.turn.tokens for each in self._ended),
            busiest=float(turns.max() / turns.mean()),
        )


def simulate(
    policy: Policy,
    servers: int,
    trace: Sequence[TraceConversation],
    model: ServerModel,
    check: Callable[[], object] = lambda: None,
) -> FleetResult:
    """Run ``trace`` through ``servers`` servers, chosen by ``policy``. ``check`` is called now and then, and
    raises when the time is over."""
    return Simulation(policy, [SimulatedServer(model) for _ in range(servers)], check).run(trace)
