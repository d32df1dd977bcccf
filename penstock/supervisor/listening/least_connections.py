"""Which API server gets the next connection: the one with the fewest, without sockets or clocks."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.wire.handover import HandoverReport

STALL_S = 5.0
"""An API server that takes nothing for so long while connections wait for it hangs: others get these, and it
gets no more until it reports. One that is only starved of CPU should keep its share."""

_NO_REPORT = HandoverReport(taken=0, open=0, accepts=False)

Server = TypeVar("Server", bound=Hashable)


@dataclass(slots=True)
class _ServerState:
    """What is known of one API server."""

    report: HandoverReport = _NO_REPORT
    # Connections given to it, without those that were taken back.
    given: int = 0
    # Its socket has no room, or it hangs: it gets nothing until it reports.
    excluded: bool = False
    # Since when connections wait to be taken by it without any being taken; None: none waits.
    waits_since: float | None = None
    # When it last got one, as a count of all that were given.
    last: int = 0

    @property
    def untaken(self) -> int:
        return self.given - self.report.taken

    @property
    def connections(self) -> int:
        return self.untaken + self.report.open


class LeastConnectionsBalancer(Generic[Server]):
    """Chooses among API servers by their connections: those that are open, and those on their way.

    Times are seconds of any monotonic clock.
    """

    def __init__(self) -> None:
        self._servers: dict[Server, _ServerState] = {}
        self._given = 0

    def add(self, server: Server) -> None:
        """It gets connections once it reports that it accepts."""
        self._servers[server] = _ServerState()

    def remove(self, server: Server) -> None:
        del self._servers[server]

    def choose(self) -> Server | None:
        """The one with the fewest connections, of several the one that has waited longest; None: nobody
        takes any."""
        chosen, fewest = None, (0, 0)
        for server, place in self._servers.items():
            if place.report.accepts and not place.excluded:
                rank = place.connections, place.last
                if chosen is None or rank < fewest:
                    chosen, fewest = server, rank
        return chosen

    def connection_sent(self, server: Server, now: float) -> None:
        """It was given a connection."""
        place = self._servers[server]
        place.given += 1
        self._given += 1
        place.last = self._given
        if place.waits_since is None:
            place.waits_since = now

    def connection_refused(self, server: Server, now: float) -> None:
        """It could not be given one: there is no room on the way to it."""
        place = self._servers[server]
        place.excluded = True
        if (
            place.waits_since is None
        ):  # the system has no room, and nothing waits whose taking it would report
            place.waits_since = now

    def on_report(self, server: Server, report: HandoverReport, now: float) -> None:
        place = self._servers[server]
        taken_before, place.report, place.excluded = place.report.taken, report, False
        if not place.untaken:
            place.waits_since = None
        elif report.taken > taken_before:
            place.waits_since = now

    def connections_taken_back(self, server: Server, count: int) -> None:
        """Connections that it had been given and has not taken."""
        place = self._servers[server]
        place.given -= count
        place.waits_since = None

    def stalled(self, now: float) -> Iterator[Server]:
        """Those that hang; they are passed over from here on."""
        for server, place in self._servers.items():
            if place.waits_since is not None and now >= place.waits_since + STALL_S:
                place.excluded, place.waits_since = True, None
                yield server

    def next_stall(self) -> float | None:
        """When :meth:`stalled` may have something to say."""
        waits = [place.waits_since for place in self._servers.values() if place.waits_since is not None]
        return min(waits) + STALL_S if waits else None
