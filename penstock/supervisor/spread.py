"""Which API server gets the next connection: the one with the fewest, without sockets or clocks."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.wire.handover import Report

STALL_S = 5.0
"""An API server that takes nothing for so long while connections wait for it hangs: others get these, and it
gets no more until it reports. One that is only starved of CPU should keep its share."""

_NOTHING = Report(taken=0, open=0, accepts=False)

Server = TypeVar("Server", bound=Hashable)


@dataclass(slots=True)
class _Place:
    """What is known of one API server."""

    report: Report = _NOTHING
    # Connections given to it, without those that were taken back.
    given: int = 0
    # Its socket has no room, or it hangs: it gets nothing until it reports.
    passed_over: bool = False
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


class Spread(Generic[Server]):
    """Chooses among API servers by their connections: those that are open, and those on their way.

    Times are seconds of any monotonic clock.
    """

    def __init__(self) -> None:
        self._places: dict[Server, _Place] = {}
        self._given = 0

    def join(self, server: Server) -> None:
        """It gets connections once it reports that it accepts."""
        self._places[server] = _Place()

    def leave(self, server: Server) -> None:
        del self._places[server]

    def choose(self) -> Server | None:
        """The one with the fewest connections, of several the one that has waited longest; None: nobody
        takes any."""
        chosen, fewest = None, (0, 0)
        for server, place in self._places.items():
            if place.report.accepts and not place.passed_over:
                rank = place.connections, place.last
                if chosen is None or rank < fewest:
                    chosen, fewest = server, rank
        return chosen

    def gave(self, server: Server, now: float) -> None:
        """It was given a connection."""
        place = self._places[server]
        place.given += 1
        self._given += 1
        place.last = self._given
        if place.waits_since is None:
            place.waits_since = now

    def full(self, server: Server, now: float) -> None:
        """It could not be given one: there is no room on the way to it."""
        place = self._places[server]
        place.passed_over = True
        if (
            place.waits_since is None
        ):  # the system has no room, and nothing waits whose taking it would report
            place.waits_since = now

    def reported(self, server: Server, report: Report, now: float) -> None:
        place = self._places[server]
        taken_before, place.report, place.passed_over = place.report.taken, report, False
        if not place.untaken:
            place.waits_since = None
        elif report.taken > taken_before:
            place.waits_since = now

    def took_back(self, server: Server, count: int) -> None:
        """Connections that it had been given and has not taken."""
        place = self._places[server]
        place.given -= count
        place.waits_since = None

    def stalled(self, now: float) -> Iterator[Server]:
        """Those that hang; they are passed over from here on."""
        for server, place in self._places.items():
            if place.waits_since is not None and now >= place.waits_since + STALL_S:
                place.passed_over, place.waits_since = True, None
                yield server

    def next_stall(self) -> float | None:
        """When :meth:`stalled` may have something to say."""
        waits = [place.waits_since for place in self._places.values() if place.waits_since is not None]
        return min(waits) + STALL_S if waits else None
