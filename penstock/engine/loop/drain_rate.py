"""Drain rate of an engine's waiting queue, from which the Retry-After of refused requests is computed."""

from __future__ import annotations

import time
from collections.abc import Callable

WINDOW_S = 30
"""Length of the sliding window in seconds."""
MIN_RETRY_MS = 1_000
MAX_RETRY_MS = 60_000
"""Bounds of the result; OpenAI's clients ignore a Retry-After above a minute."""
_IDLE = -1


class DrainRate:
    """Streams that ended in each of the last seconds. Seconds without a step are left out: the engine was
    idle."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` returns monotonic seconds."""
        self._clock = clock
        self._ended = [_IDLE] * WINDOW_S
        """Ring buffer: streams that ended in second s, at s modulo its length."""
        self._second = int(clock())
        """The latest second in the ring."""

    def step(self, ended: int) -> None:
        """Count a step in which ``ended`` streams ended and freed their slots."""
        self._advance()
        index = self._second % WINDOW_S
        self._ended[index] = max(self._ended[index], 0) + ended

    def retry_after_ms(self, waiting: int) -> int:
        """Milliseconds until ``waiting`` streams and one more have got slots, at the current drain rate.

        If no stream has ended within the window, one end is assumed.
        """
        self._advance()
        busy = [ended for ended in self._ended if ended != _IDLE]
        estimate = 1000 * (waiting + 1) * len(busy) // max(sum(busy), 1)
        return min(max(estimate, MIN_RETRY_MS), MAX_RETRY_MS)

    def _advance(self) -> None:
        """Clear the seconds that have left the window."""
        now = int(self._clock())
        for second in range(max(self._second, now - WINDOW_S) + 1, now + 1):
            self._ended[second % WINDOW_S] = _IDLE
        self._second = max(self._second, now)
