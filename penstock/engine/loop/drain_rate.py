"""How fast an engine works off what waits: the base of the time that refused clients are told to wait."""

from __future__ import annotations

import time
from collections.abc import Callable

WINDOW_S = 30
"""Seconds of the past that count, in steps of one."""
MIN_RETRY_MS = 1_000
MAX_RETRY_MS = 60_000
"""Bounds of an answer; clients of OpenAI's API heed nothing above a minute."""
_IDLE = -1


class DrainRate:
    """Streams that ended lately, by second. Seconds without a step do not count: there was nothing to do."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` gives seconds."""
        self._clock = clock
        self._ended = [_IDLE] * WINDOW_S
        """A ring: streams that ended in second s stand at s modulo its length."""
        self._second = int(clock())
        """The latest second that the ring has."""

    def step(self, ended: int) -> None:
        """The engine has made a step, and so many streams have ended and left their places to others."""
        self._advance()
        place = self._second % WINDOW_S
        self._ended[place] = max(self._ended[place], 0) + ended

    def retry_after_ms(self, waiting: int) -> int:
        """How long it takes until ``waiting`` streams and one more have got places, if it goes on like this.

        While none has ended, one is taken to be about to.
        """
        self._advance()
        busy = [ended for ended in self._ended if ended != _IDLE]
        estimate = 1000 * (waiting + 1) * len(busy) // max(sum(busy), 1)
        return min(max(estimate, MIN_RETRY_MS), MAX_RETRY_MS)

    def _advance(self) -> None:
        """Forget the seconds that have left the window."""
        now = int(self._clock())
        for second in range(max(self._second, now - WINDOW_S) + 1, now + 1):
            self._ended[second % WINDOW_S] = _IDLE
        self._second = max(self._second, now)
