"""Chooses the API server that gets the next connection: the one with the fewest. No sockets, no clock."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.wire.handover import HandoverError, HandoverReport

STALL_S = 5.0
"""Seconds after which an API server that takes none of its waiting connections counts as hung: others get
those, and it gets no more until it reports. Long enough for one that is only starved of CPU to keep its
share."""

_NO_REPORT = HandoverReport(taken=0, open=0, accepts=False)

Server = TypeVar("Server", bound=Hashable)


@dataclass(slots=True)
class _ServerState:
    """Connections of one API server."""

    report: HandoverReport = _NO_REPORT
    sent: int = 0
    """Connections sent to it, without those that were taken back."""
    excluded: bool = False
    """Whether the server's socket is full, or it hangs: it gets nothing until it reports."""
    waits_since: float | None = None
    """Since when it has taken none of the connections that wait for it; None: none wait."""
    last: int = 0
    """Serial number of the last connection sent to it."""

    @property
    def untaken(self) -> int:
        return self.sent - self.report.taken

    @property
    def connections(self) -> int:
        return self.untaken + self.report.open


class LeastConnectionsBalancer(Generic[Server]):
    """Chooses among API servers by their connections: open ones and those sent but not taken yet.

    Times are seconds of any monotonic clock.
    """

    def __init__(self, max_in_transit: int = sys.maxsize) -> None:
        """``max_in_transit``: maximum connections that were sent and not taken yet, over all servers."""
        self._servers: dict[Server, _ServerState] = {}
        self._sent = 0
        self._max_in_transit = max_in_transit

    def add_server(self, server: Server) -> None:
        """Add a server; it gets connections once it reports that it accepts them."""
        self._servers[server] = _ServerState()

    def remove(self, server: Server) -> None:
        del self._servers[server]

    def all_accept(self) -> bool:
        """Whether there are servers, and all of them accept connections."""
        return bool(self._servers) and all(state.report.accepts for state in self._servers.values())

    def choose(self) -> Server | None:
        """The server with the fewest connections, among equals the one whose last connection is oldest; None:
        no server takes any, or too many connections are on their way."""
        if sum(state.untaken for state in self._servers.values()) >= self._max_in_transit:
            return None
        chosen, fewest = None, (0, 0)
        for server, state in self._servers.items():
            if state.report.accepts and not state.excluded:
                key = state.connections, state.last
                if chosen is None or key < fewest:
                    chosen, fewest = server, key
        return chosen

    def connection_sent(self, server: Server, now: float) -> None:
        """A connection was sent to the server."""
        state = self._servers[server]
        state.sent += 1
        self._sent += 1
        state.last = self._sent
        if state.waits_since is None:
            state.waits_since = now

    def connection_refused(self, server: Server, now: float) -> None:
        """A connection could not be sent to the server: its socket is full."""
        state = self._servers[server]
        state.excluded = True
        if state.waits_since is None:  # the system is short of room, and no connection of its own waits
            state.waits_since = now

    def on_report(self, server: Server, report: HandoverReport, now: float) -> None:
        """The server reports its connections, and gets some again if it was excluded. Raises HandoverError if
        it has taken connections that it never got."""
        state = self._servers[server]
        if report.taken > state.sent:
            raise HandoverError(f"it counts {report.taken} connections of {state.sent}")
        taken_before, state.report, state.excluded = state.report.taken, report, False
        if not state.untaken:
            state.waits_since = None
        elif report.taken > taken_before:
            state.waits_since = now

    def exclude(self, server: Server) -> None:
        """The server gets no more connections, as nothing it reports can be trusted."""
        state = self._servers[server]
        state.report, state.waits_since = _NO_REPORT._replace(taken=state.report.taken), None

    def connections_taken_back(self, server: Server, count: int) -> None:
        """Connections sent to the server, which it had not taken, are no longer its own."""
        state = self._servers[server]
        state.sent -= count
        state.waits_since = None

    def stalled(self, now: float) -> Iterator[Server]:
        """Excludes the servers that hang, and yields them."""
        for server, state in self._servers.items():
            if state.waits_since is not None and now >= state.waits_since + STALL_S:
                state.excluded, state.waits_since = True, None
                yield server

    def next_stall(self) -> float | None:
        """When :meth:`stalled` may find a server."""
        waits = [state.waits_since for state in self._servers.values() if state.waits_since is not None]
        return min(waits) + STALL_S if waits else None
