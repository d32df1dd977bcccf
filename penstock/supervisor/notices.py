"""What API servers are told of the engines, each and whenever it starts, and which one speaks in the log."""

from __future__ import annotations

import logging

from penstock.supervisor.actions import Name
from penstock.supervisor.agreement import Register
from penstock.supervisor.children import Child, Children, State
from penstock.wire.control import DrainEngine, EnginesDraining, Order, ProposeState, Speak


class Notices:
    """Which engines get no new streams, the states that all engines agree on, and who speaks.

    ``all_engines`` counts those of all hosts.
    """

    def __init__(self, children: Children, all_engines: int) -> None:
        self._children = children
        self._all_engines = all_engines
        # Ranks of the engines that get no new streams.
        self._draining: set[int] = set()
        self._register = Register()
        self._speaker: Name | None = None

    def tell(self, server: Child) -> None:
        """Everything there is to know, to an API server that has become ready."""
        if self._draining:
            self._children.send(server, self._engines_draining())
        if self._register.agreed.revision:
            self._children.send(server, self._register.agreed)

    def drain_engine(self, child: Child, report: DrainEngine) -> None:
        """An API server asked for it; those that start are told when they are ready."""
        if report.rank >= self._all_engines:
            told = f"{child.name} asked for engine {report.rank}, which there is not"
            self._children.say(logging.ERROR, told)
            return
        change = self._draining.add if report.draining else self._draining.discard
        change(report.rank)
        how = "no longer" if report.draining else "again"
        self._children.say(logging.INFO, f"engine {report.rank} gets new streams {how}")
        self._tell_all(self._engines_draining())

    def propose(self, child: Child, change: ProposeState) -> None:
        """Decides a change that all engines have prepared; one that comes too late is told what is agreed."""
        if self._register.propose(change):
            self._children.say(logging.INFO, f"agreed: {change.name} {change.arguments}")
            self._tell_all(self._register.agreed)
        else:
            self._children.send(child, self._register.agreed)

    def adopted(self, server: Name, revision: int) -> None:
        """An API server acts by a revision of what is agreed."""
        self._register.confirm(server, revision)
        self._settle()

    def forget(self, server: Name) -> None:
        """It is gone, and not waited for."""
        self._register.forget(server)
        self._settle()
        if server == self._speaker:
            self._speaker = None
            self.appoint_speaker()

    def appoint_speaker(self) -> None:
        """One that gets new connections, unless there is none or one speaks already."""
        ready = [child.name for child in self._children.of("api-server", State.READY)]
        if ready and self._speaker not in ready:
            self._speaker = ready[0]
            self._children.send(self._children[self._speaker], Speak())

    def _settle(self) -> None:
        if self._register.adopt([child.name for child in self._serving()]):
            self._tell_all(self._register.agreed)

    def _engines_draining(self) -> EnginesDraining:
        return EnginesDraining(ranks=sorted(self._draining))

    def _tell_all(self, order: Order) -> None:
        for server in self._serving():
            self._children.send(server, order)

    def _serving(self) -> list[Child]:
        """API servers that may have clients; those that start are told everything when they are ready."""
        return self._children.of("api-server", State.READY, State.RETIRING)
