"""How many requests may be sent a second time."""

from __future__ import annotations

from dataclasses import dataclass

RETRY_RATIO = 0.2
MIN_RETRIES_PER_S = 2.0
BUCKET_SIZE = 100.0


@dataclass(slots=True)
class RetryBudget:
    """A bucket of retries: each request adds SHARE of one, each second MIN_RETRIES_PER_S; it holds at most
    MOST.

    So retries multiply the load of a fleet in trouble by 1.2 at most, while a single failure is always
    retried. Times are seconds of any monotonic clock.
    """

    _tokens: float = BUCKET_SIZE
    _filled_at: float = 0.0

    def on_request(self, now: float) -> None:
        """A request arrived."""
        self._fill(now, RETRY_RATIO)

    def try_take(self, now: float) -> bool:
        """Whether one more retry may be made; then it is counted."""
        self._fill(now, 0.0)
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def _fill(self, now: float, more: float) -> None:
        self._tokens = min(
            BUCKET_SIZE, self._tokens + more + MIN_RETRIES_PER_S * max(0.0, now - self._filled_at)
        )
        self._filled_at = now
