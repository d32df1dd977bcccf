"""When a child that exited is restarted: exponential back-off, and a count of failed starts. No clock."""

from __future__ import annotations

FIRST_DELAY_S = 0.1
MAX_DELAY_S = 30.0
MAX_MEDIA_DELAY_S = 2.0
"""Of media workers: what ends them is a picture, which is refused after two of them. Requests wait for the
next one."""
STABLE_AFTER_S = 60.0
"""A child that was ready for this long starts over with the first delay."""
MAX_FAILED_STARTS = 3
"""Failed starts in a row from which on a child keeps failing. Counted without a time window: an engine that
takes minutes to fail would never fail often enough within one."""


class RestartPolicy:
    """The back-off of one child, or of a group. Times are seconds of any monotonic clock. ``max_delay``: the
    longest wait for a child that does not keep failing to start."""

    def __init__(self, max_delay: float = MAX_DELAY_S) -> None:
        self._max_delay = max_delay
        self._ready_at: float | None = None
        self._failed_starts = 0
        self._delay = FIRST_DELAY_S

    def on_ready(self, now: float) -> None:
        self._ready_at = now
        self._failed_starts = 0

    @property
    def keeps_failing(self) -> bool:
        """Whether as many starts in a row have failed as are forgiven."""
        return self._failed_starts >= MAX_FAILED_STARTS

    def next_delay(self, now: float, *, started: bool = True) -> float:
        """Count an exit. Returns seconds to wait before the next start. Not ``started``: the system refused
        another process, which says nothing about this one."""
        if not started:
            pass
        elif self._ready_at is None:
            self._failed_starts += 1
        elif now - self._ready_at >= STABLE_AFTER_S:
            self._delay = FIRST_DELAY_S
        self._ready_at = None
        longest = MAX_DELAY_S if self.keeps_failing else self._max_delay
        delay = min(self._delay, longest)
        self._delay = min(2 * delay, longest)
        return delay
