"""Keeps requests away from an endpoint that fails, and finds out when it has recovered."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.gateway.responses.outcome import ENDPOINT_FAULTS, Outcome

CONSECUTIVE_FAILURES = 3
"""Failures in a row that open the breaker; a fast failing endpoint makes them within milliseconds."""
WINDOW_S = 10.0
FAILURE_RATIO = 0.5
MIN_REQUESTS = 10
"""It also opens when at least SHARE of at least LEAST requests that ended within about WINDOW_S failed."""
FIRST_OPEN_S = 1.0
MAX_OPEN_S = 30.0
"""How long it stays open: doubled each time a probe fails."""


@dataclass(slots=True)
class CircuitBreaker:
    """Closed: every request may go. Open: none. Half open, after a pause: one at a time, the probe.

    Only what an endpoint is to blame for counts as failure: network errors, 5xx, broken streams; never 4xx
    or clients that leave. Times are seconds of any monotonic clock.
    """

    _consecutive_failures: int = 0
    """Failures in a row."""
    _request_count: float = 0.0
    _failure_count: float = 0.0
    """Requests that ended and failed lately; both decay with time."""
    _counted_at: float = 0.0
    _open_until: float | None = None
    _open_s: float = FIRST_OPEN_S
    _probe_until: float = 0.0
    """A probe is on its way; it counts as lost at this time."""

    @property
    def closed(self) -> bool:
        return self._open_until is None

    def allows(self, now: float) -> bool:
        """Whether a request may be sent."""
        return self._open_until is None or (now >= self._open_until and now >= self._probe_until)

    def request_sent(self, now: float) -> None:
        """A request is sent; while half open it is the probe."""
        if self._open_until is not None:
            self._probe_until = now + MAX_OPEN_S

    def record_outcome(self, outcome: Outcome, now: float, sent_at: float) -> None:
        """A request that was sent has ended so."""
        if outcome in ENDPOINT_FAULTS:
            self.record_failure(now, sent_at)
        elif outcome is Outcome.CLIENT_DISCONNECT:
            self.release_probe()
        else:
            self.record_success(now, sent_at)

    def release_probe(self) -> None:
        """The request ended without telling anything about the endpoint (its client left)."""
        self._probe_until = 0.0

    def record_success(self, now: float, sent_at: float) -> None:
        self._count(now, 0.0)
        self._consecutive_failures = 0
        if self._is_probe(sent_at):
            self._open_until = None
            self._open_s = FIRST_OPEN_S
            self._request_count = self._failure_count = 0.0

    def record_failure(self, now: float, sent_at: float) -> None:
        self._count(now, 1.0)
        self._consecutive_failures += 1
        if self._is_probe(sent_at):
            self._open_s = min(2 * self._open_s, MAX_OPEN_S)
            self._open(now)
        elif self._open_until is None and (
            self._consecutive_failures >= CONSECUTIVE_FAILURES
            or (
                self._request_count >= MIN_REQUESTS
                and self._failure_count >= FAILURE_RATIO * self._request_count
            )
        ):
            self._open(now)

    def _is_probe(self, sent_at: float) -> bool:
        """Long replies that began before it opened end while it is half open: they tell of the past."""
        return self._open_until is not None and sent_at >= self._open_until

    def _open(self, now: float) -> None:
        self._open_until = now + self._open_s
        self._probe_until = 0.0

    def _count(self, now: float, failure: float) -> None:
        kept = 0.5 ** ((now - self._counted_at) / WINDOW_S)
        self._counted_at = now
        self._request_count = self._request_count * kept + 1.0
        self._failure_count = self._failure_count * kept + failure
