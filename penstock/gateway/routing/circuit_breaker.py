"""Circuit breaker: stops sending requests to a failing endpoint, and probes whether it has recovered."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.gateway.responses.outcome import ENDPOINT_FAULTS, Outcome

CONSECUTIVE_FAILURES = 3
"""Consecutive failures that open the breaker; an endpoint that fails fast has them within milliseconds."""
WINDOW_S = 10.0
FAILURE_RATIO = 0.5
MIN_REQUESTS = 10
"""It also opens when FAILURE_RATIO of at least MIN_REQUESTS requests within about WINDOW_S failed."""
FIRST_OPEN_S = 1.0
MAX_OPEN_S = 30.0
"""Seconds that it stays open: the first time, and at most; doubled each time a probe fails."""


@dataclass(slots=True)
class CircuitBreaker:
    """Closed: requests are sent. Open: none is sent. Half open, after a pause: one at a time, the probe.

    Only faults of the endpoint count as failures: network errors, 5xx, broken streams; never 4xx or clients
    that disconnect. Times are seconds of any monotonic clock.
    """

    _consecutive_failures: int = 0
    _request_count: float = 0.0
    _failure_count: float = 0.0
    """Recent requests and failures; both decay with time."""
    _counted_at: float = 0.0
    _open_until: float | None = None
    _open_s: float = FIRST_OPEN_S
    _probe_until: float = 0.0
    """When the probe in flight counts as lost."""

    @property
    def closed(self) -> bool:
        return self._open_until is None

    def allows(self, now: float) -> bool:
        """Whether a request may be sent."""
        return self._open_until is None or (now >= self._open_until and now >= self._probe_until)

    def request_sent(self, now: float) -> None:
        """A request is sent; in the half-open state it is the probe."""
        if self._open_until is not None:
            self._probe_until = now + MAX_OPEN_S

    def record_outcome(self, outcome: Outcome, now: float, sent_at: float) -> None:
        """A request sent at ``sent_at`` has ended with this outcome."""
        if outcome in ENDPOINT_FAULTS:
            self.record_failure(now, sent_at)
        elif outcome is Outcome.CLIENT_DISCONNECT:
            self.release_probe()
        else:
            self.record_success(now, sent_at)

    def release_probe(self) -> None:
        """The request says nothing about the endpoint, for example because its client disconnected."""
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
        """Whether the request was sent while half open: replies that started earlier do not close it."""
        return self._open_until is not None and sent_at >= self._open_until

    def _open(self, now: float) -> None:
        self._open_until = now + self._open_s
        self._probe_until = 0.0

    def _count(self, now: float, failure: float) -> None:
        kept = 0.5 ** ((now - self._counted_at) / WINDOW_S)
        self._counted_at = now
        self._request_count = self._request_count * kept + 1.0
        self._failure_count = self._failure_count * kept + failure
