"""Rounds in which API servers are asked for their metrics, since one of them is about to show all. No I/O."""

from __future__ import annotations

from collections.abc import Collection

from penstock.wire.coordination import MetricsRequest

ROUND_INTERVAL_S = 0.01
"""Minimum seconds between the beginnings of two rounds: bounds what a flood of scrapes costs the API servers.
A query that comes during a round waits for the next one."""
ROUND_TIMEOUT_S = 0.2
"""Seconds that a round waits for API servers."""


class MetricsRounds:
    """One round at a time. An API server that has not answered in time is left out until it does."""

    def __init__(self) -> None:
        self._queries: list[tuple[bytes, int]] = []
        """API server and number of the queries that wait for the next round."""
        self._number = 0
        self._served: list[tuple[bytes, int]] = []
        """The queries of the round."""
        self._waiting: set[bytes] = set()
        """API servers that have not answered in the round."""
        self._began_at = float("-inf")
        self._late: dict[bytes, int] = {}
        """API servers that have not answered in time, and the number of that round."""

    def add_query(self, identity: bytes, number: int) -> None:
        """An API server has sent its own metrics, and wants those of the others."""
        self._queries.append((identity, number))

    def on_sent(self, identity: bytes, number: int) -> None:
        """An API server has answered in a round."""
        if self._late.get(identity, number + 1) <= number:
            del self._late[identity]
        if number == self._number:
            self._waiting.discard(identity)

    def advance(
        self, members: Collection[bytes], now: float
    ) -> tuple[list[tuple[bytes, MetricsRequest]], list[tuple[bytes, int]]]:
        """Requests to be sent, and queries to be answered. ``members``: all API servers."""
        if not (self._served or self._queries):
            return [], []
        answers: list[tuple[bytes, int]] = []
        if self._served:
            answers += self._end_round(members, now)
        if self._served or not self._queries or now < self._began_at + ROUND_INTERVAL_S:
            return [], answers
        self._number += 1
        self._served, self._queries, self._began_at = self._queries, [], now
        asking = {identity for identity, _ in self._served}
        self._late = {identity: number for identity, number in self._late.items() if identity in members}
        self._waiting = {each for each in members if each not in asking and each not in self._late}
        requests = [(identity, MetricsRequest(self._number)) for identity in sorted(self._waiting)]
        return requests, answers + self._end_round(members, now)

    def _end_round(self, members: Collection[bytes], now: float) -> list[tuple[bytes, int]]:
        """Return the queries of the round, if all have answered or the time is over."""
        self._waiting.intersection_update(members)
        if self._waiting and now < self._began_at + ROUND_TIMEOUT_S:
            return []
        self._late |= dict.fromkeys(self._waiting, self._number)
        self._waiting = set()
        served, self._served = self._served, []
        return served

    def advance_at(self) -> float | None:
        """When to call :meth:`advance` if nothing comes before; None: there is no query."""
        if self._served:
            return self._began_at + ROUND_TIMEOUT_S
        return self._began_at + ROUND_INTERVAL_S if self._queries else None
