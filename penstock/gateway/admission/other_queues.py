"""The queues of the gateway's other workers, as flow control sees them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

TICKS_PER_S = 10_000
"""Arrivals are compared in units of 0.1 ms, which fit for 55 years into :data:`ARRIVAL_BITS`."""
ARRIVAL_BITS = 44
MAX_PRIORITY = 1 << 17
"""Greater priorities, of either sign, count as this one."""


class OtherQueues(Protocol):
    """Figures are of all other workers together, by :func:`key_for_all` of the endpoints waited for."""

    @property
    def alone(self) -> bool:
        """Whether there are no other workers now."""

    @property
    def are_waiting(self) -> bool:
        """Whether requests wait anywhere."""

    def publish(self, key: int, promised: int, first: int) -> None:
        """This worker has granted so many places that no endpoint counts yet; ``first``: the rank of the
        first request that waits, 0 without any."""

    def promised(self, key: int) -> int:
        """Places that are granted, and that no endpoint counts yet."""

    def first(self, key: int) -> int:
        """Rank of the first request that waits; 0: none does."""

    def wake(self) -> None:
        """Places have become free: those that wait may get them."""


class _NoOthers:
    """There are no other workers."""

    alone = True
    are_waiting = False

    def publish(self, key: int, promised: int, first: int) -> None:
        pass

    def promised(self, key: int) -> int:
        return 0

    def first(self, key: int) -> int:
        return 0

    def wake(self) -> None:
        pass


NO_OTHERS: OtherQueues = _NoOthers()


def rank_for_all(priority: int, arrived_at: float) -> int:
    """A number above 0. The smallest goes first, of all workers' requests that are first in their queues."""
    band = MAX_PRIORITY - max(-MAX_PRIORITY, min(priority, MAX_PRIORITY))
    return (band << ARRIVAL_BITS) + int(arrived_at * TICKS_PER_S) + 1


def key_for_all(key: Hashable) -> int:
    """A hash that is the same in all workers, whose hashes of texts are the same."""
    return hash(_texts(key))


def _texts(key: Hashable) -> Hashable:
    if isinstance(key, frozenset):
        return tuple(sorted(key))
    if isinstance(key, tuple):
        return tuple(map(_texts, key))
    return "" if key is None else key
