"""Circuit breaker: keeps requests from a failing endpoint, and probes whether it has recovered."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.gateway.responses.outcome import Outcome

CONSECUTIVE_FAILURES = 3
"""Consecutive failures that open the breaker; an endpoint that fails fast has them within milliseconds."""
WINDOW_S = 10.0
FAILURE_RATIO = 0.5
MIN_REQUESTS = 10
"""It also opens when FAILURE_RATIO of at least MIN_REQUESTS requests within about WINDOW_S met a fault."""
MOST_CLIENTS = 8
"""Clients whose latest success is remembered."""
FIRST_OPEN_S = 1.0
MAX_OPEN_S = 30.0
"""Seconds that it stays open: the first time, and at most; doubled each time a probe fails."""


@dataclass(slots=True)
class CircuitBreaker:
    """Closed: requests are sent. Open: none is sent. Half open, after a pause: one at a time, the probe.

    There are two kinds of failures. A fault (no connection, a broken one, a time-out, a cut stream) shows
    that the endpoint does not work. An error that it answers (5xx, an error event, malformed content) may be
    due to the request. So errors count by client: those of one or two clients do not open the breaker while
    the endpoint serves others. And a breaker that errors have opened only :attr:`avoids`: without a better
    endpoint requests are sent nevertheless, and the first good reply closes it.

    4xx and clients that disconnect are no failures. Times are seconds of any monotonic clock.
    """

    _faults: int = 0
    _errors: int = 0
    """Since the latest success."""
    _failing: set[str] = field(default_factory=set)
    """Clients that got these errors, at most CONSECUTIVE_FAILURES of them."""
    _served: dict[str, float] = field(default_factory=dict)
    """Time of the latest success of a client; the latest one last."""
    _request_count: float = 0.0
    _fault_count: float = 0.0
    """Recent requests and faults; both decay with time."""
    _counted_at: float = 0.0
    _opened_at: float = 0.0
    _open_until: float | None = None
    _open_s: float = FIRST_OPEN_S
    _probe_until: float = 0.0
    """When the probe in flight counts as lost."""
    _by_errors: bool = False
    """Errors have opened it, not faults."""

    @property
    def closed(self) -> bool:
        return self._open_until is None

    @property
    def avoids(self) -> bool:
        """It is open, but the endpoint answers, if with errors."""
        return self._open_until is not None and self._by_errors

    def allows(self, now: float) -> bool:
        """Whether a request may be sent."""
        return self._open_until is None or (now >= self._open_until and now >= self._probe_until)

    def request_sent(self, now: float) -> None:
        """A request is sent; in the half-open state it is the probe."""
        if self._was_half_open(now):
            self._probe_until = now + MAX_OPEN_S

    def record_outcome(self, outcome: Outcome, now: float, sent_at: float, client: str = "") -> None:
        """A request that was sent at ``sent_at`` for ``client`` has ended with this outcome."""
        match outcome:
            case Outcome.NETWORK_ERROR:
                self.record_fault(now, sent_at)
            case Outcome.MODEL_SERVER_ERROR | Outcome.CONTENT_ERROR:
                self.record_error(now, sent_at, client)
            case Outcome.CLIENT_ERROR if not self.avoids and self._was_half_open(sent_at):
                self._close()  # it is there again
            case Outcome.CLIENT_ERROR | Outcome.CLIENT_DISCONNECT | Outcome.REJECTED:
                self.release_probe()
            case _:
                self.record_success(now, sent_at, client)

    def release_probe(self) -> None:
        """The request says nothing about the endpoint, for example because its client disconnected."""
        self._probe_until = 0.0

    def record_success(self, now: float, sent_at: float, client: str = "") -> None:
        self._count(now, 0.0)
        self._faults = self._errors = 0
        self._failing.clear()
        self._served.pop(client, None)
        self._served[client] = now
        if len(self._served) > MOST_CLIENTS:
            del self._served[next(iter(self._served))]
        if self._was_half_open(sent_at) or (self.avoids and sent_at >= self._opened_at):
            self._close()

    def record_fault(self, now: float, sent_at: float) -> None:
        """The endpoint could not be reached, or did not complete its reply."""
        self._count(now, 1.0)
        self._faults += 1
        if self._was_half_open(sent_at):
            self._open_again(now, by_errors=False)
        elif (self.closed or self.avoids) and (
            self._faults >= CONSECUTIVE_FAILURES
            or (
                self._request_count >= MIN_REQUESTS
                and self._fault_count >= FAILURE_RATIO * self._request_count
            )
        ):
            self._open(now, by_errors=False)

    def record_error(self, now: float, sent_at: float, client: str = "") -> None:
        """The endpoint answered with an error of its own."""
        self._count(now, 0.0)
        self._errors += 1
        if len(self._failing) < CONSECUTIVE_FAILURES:
            self._failing.add(client)
        if self._was_half_open(sent_at):
            self._open_again(now, by_errors=True)
        elif self.closed and self._errors >= CONSECUTIVE_FAILURES and not self._serves_others(now):
            self._open(now, by_errors=True)

    def _serves_others(self, now: float) -> bool:
        """Whether clients without errors were served lately, and few clients got errors."""
        return len(self._failing) < CONSECUTIVE_FAILURES and any(
            client not in self._failing and now - at < WINDOW_S for client, at in self._served.items()
        )

    def _was_half_open(self, at: float) -> bool:
        """Whether a request that was sent then is a probe: replies that started earlier do not count."""
        return self._open_until is not None and at >= self._open_until

    def _open(self, now: float, *, by_errors: bool) -> None:
        self._opened_at, self._open_until = now, now + self._open_s
        self._probe_until = 0.0
        self._by_errors = by_errors

    def _open_again(self, now: float, *, by_errors: bool) -> None:
        self._open_s = min(2 * self._open_s, MAX_OPEN_S)
        self._open(now, by_errors=by_errors)

    def _close(self) -> None:
        self._open_until = None
        self._open_s = FIRST_OPEN_S
        self._faults = self._errors = 0
        self._failing.clear()
        self._request_count = self._fault_count = 0.0

    def _count(self, now: float, fault: float) -> None:
        kept = 0.5 ** ((now - self._counted_at) / WINDOW_S)
        self._counted_at = now
        self._request_count = self._request_count * kept + 1.0
        self._fault_count = self._fault_count * kept + fault
