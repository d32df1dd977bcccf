"""Keeps requests away from an endpoint that fails, and finds out when it has recovered."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.gateway.outcome import BLAMED, Outcome

CONSECUTIVE = 3
"""Failures in a row that open the breaker; a fast failing endpoint makes them within milliseconds."""
WINDOW_S = 10.0
SHARE = 0.5
LEAST = 10
"""It also opens when at least SHARE of at least LEAST requests that ended within about WINDOW_S failed."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
"""How long it stays open: doubled each time a probe fails."""


@dataclass(slots=True)
class Breaker:
    """Closed: every request may go. Open: none. Half open, after a pause: one at a time, the probe.

    Only what an endpoint is to blame for counts as failure: network errors, 5xx, broken streams; never 4xx
    or clients that leave. Times are seconds of any monotonic clock.
    """

    _row: int = 0
    """Failures in a row."""
    _ended: float = 0.0
    _failed: float = 0.0
    """Requests that ended and failed lately; both decay with time."""
    _counted_at: float = 0.0
    _open_until: float | None = None
    _pause_s: float = FIRST_PAUSE_S
    _probe_until: float = 0.0
    """A probe is on its way; it counts as lost at this time."""

    @property
    def closed(self) -> bool:
        return self._open_until is None

    def allows(self, now: float) -> bool:
        """Whether a request may be sent."""
        return self._open_until is None or (now >= self._open_until and now >= self._probe_until)

    def sent(self, now: float) -> None:
        """A request is sent; while half open it is the probe."""
        if self._open_until is not None:
            self._probe_until = now + LONGEST_PAUSE_S

    def judged(self, outcome: Outcome, now: float, sent_at: float) -> None:
        """A request that was sent has ended so."""
        if outcome in BLAMED:
            self.failed(now, sent_at)
        elif outcome is Outcome.CLIENT_DISCONNECT:
            self.released()
        else:
            self.succeeded(now, sent_at)

    def released(self) -> None:
        """The request ended without telling anything about the endpoint (its client left)."""
        self._probe_until = 0.0

    def succeeded(self, now: float, sent_at: float) -> None:
        self._count(now, 0.0)
        self._row = 0
        if self._is_probe(sent_at):
            self._open_until = None
            self._pause_s = FIRST_PAUSE_S
            self._ended = self._failed = 0.0

    def failed(self, now: float, sent_at: float) -> None:
        self._count(now, 1.0)
        self._row += 1
        if self._is_probe(sent_at):
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._open(now)
        elif self._open_until is None and (
            self._row >= CONSECUTIVE or (self._ended >= LEAST and self._failed >= SHARE * self._ended)
        ):
            self._open(now)

    def _is_probe(self, sent_at: float) -> bool:
        """Long replies that began before it opened end while it is half open: they tell of the past."""
        return self._open_until is not None and sent_at >= self._open_until

    def _open(self, now: float) -> None:
        self._open_until = now + self._pause_s
        self._probe_until = 0.0

    def _count(self, now: float, failure: float) -> None:
        kept = 0.5 ** ((now - self._counted_at) / WINDOW_S)
        self._counted_at = now
        self._ended = self._ended * kept + 1.0
        self._failed = self._failed * kept + failure
