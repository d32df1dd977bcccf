"""Limits how many requests are retried."""

from __future__ import annotations

from dataclasses import dataclass

RETRY_RATIO = 0.2
"""Retries that each request adds to the bucket."""
MIN_RETRIES_PER_S = 2.0
"""Retries that each second adds to the bucket."""
BUCKET_SIZE = 100.0


@dataclass(slots=True)
class RetryBudget:
    """A token bucket of at most BUCKET_SIZE retries, filled by requests and by time.

    Retries so multiply the load of overloaded endpoints by at most 1.2, and a single failure is always
    retried. Times are seconds of any monotonic clock.
    """

    _tokens: float = BUCKET_SIZE
    _filled_at: float = 0.0

    def on_request(self, now: float) -> None:
        """A request arrived."""
        if self._tokens < BUCKET_SIZE:
            self._fill(now, RETRY_RATIO)

    def allows(self, now: float) -> bool:
        """Whether a retry is left."""
        return self._level(now) >= 1.0

    def spend(self, now: float) -> None:
        """Count a retry that :meth:`allows` has granted."""
        self._fill(now, -1.0)

    def _fill(self, now: float, more: float) -> None:
        self._tokens = min(BUCKET_SIZE, self._level(now) + more)
        self._filled_at = now

    def _level(self, now: float) -> float:
        return min(BUCKET_SIZE, self._tokens + MIN_RETRIES_PER_S * max(0.0, now - self._filled_at))
