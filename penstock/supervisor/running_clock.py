"""A clock for deadlines that stands still while the supervisor does not run.

A supervisor that is stopped, starved or paused with its machine hears and does nothing, and its children were
perhaps stopped with it. On this clock no deadline passes meanwhile: no child counts as hung or late, and no
drain is cut short.
"""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_DELAY_S = 2.0
"""A longer time between two looks at the clock, besides the waits in between, is not the process's own."""
MAX_WAIT_S = 1.0
"""Longest wait: a longer one that the process was stopped in could still end in time."""


class RunningClock:
    """Seconds of any monotonic clock, without those in which this process did not run."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lost = 0.0
        self._seen_at = self._due = clock()
        """When the clock was looked at last, and when it had to be looked at again."""

    def now(self) -> float:
        now = self._clock()
        if now > self._due + MAX_DELAY_S:
            self._lost += now - self._seen_at
        self._seen_at = self._due = now
        return now - self._lost

    def wait(self, seconds: float) -> None:
        """To be called before a wait of so many seconds, at most MAX_WAIT_S."""
        self.now()
        self._due += seconds
