"""How fast a queue drains: for an honest Retry-After."""

from __future__ import annotations

import math
from dataclasses import dataclass

WINDOW_S = 10.0
"""The rate is an average over about this time."""


@dataclass(slots=True)
class DepartureRate:
    """Requests per second that leave a queue for an endpoint. Times are seconds of any clock."""

    _count: float = 0.0
    """Requests, each with a weight that decays with its age."""
    _counted_at: float = 0.0
    _began_at: float | None = None

    def resume(self, now: float) -> None:
        """The queue was empty: a rate of long ago says nothing."""
        if now - self._counted_at > WINDOW_S:
            self._count, self._began_at = 0.0, None

    def count_departure(self, now: float) -> None:
        if self._began_at is None:
            self._began_at = now
        self._count = self._decayed(now) + 1.0
        self._counted_at = now

    def per_second(self, now: float) -> float:
        """0: no request has left yet."""
        if self._began_at is None:
            return 0.0
        seen_s = max(now - self._began_at, 1.0)
        return self._decayed(now) / (WINDOW_S * (1.0 - math.exp(-seen_s / WINDOW_S)))

    def _decayed(self, now: float) -> float:
        return self._count * math.exp((self._counted_at - now) / WINDOW_S)
