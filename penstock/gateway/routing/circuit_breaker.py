"""Circuit breaker: keeps requests from a failing endpoint, and probes whether it has recovered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.gateway.responses.outcome import Outcome
from penstock.gateway.routing.failing_clients import FailingClients

CONSECUTIVE_FAILURES = 3
"""Consecutive failures that open the breaker; an endpoint that fails fast has them within milliseconds."""
WINDOW_S = 10.0
FAILURE_RATIO = 0.5
MIN_REQUESTS = 10
"""A breaker also opens when FAILURE_RATIO of at least MIN_REQUESTS requests within about WINDOW_S have
failed."""
MAX_CLIENTS = 8
"""Clients whose latest success, and clients whose latest failure, are remembered."""
FIRST_OPEN_S = 1.0
MAX_OPEN_S = 3.0
"""Seconds that it stays open: the first time, and at most; doubled each time a probe fails. With the wait for
a probe, a server that is well again is out for less than 5 s."""
MAX_PROBES = 8
PROBE_GROWTH_S = 1.0
"""Probes in flight at most; in the half-open state their number doubles every PROBE_GROWTH_S, from one on."""
LOST_PROBE_S = 30.0
"""Time after which probes in flight count as lost."""


@dataclass(slots=True)
class CircuitBreaker:
    """Closed: requests are sent. Open: none is sent. Half open, after a pause: a few at a time, the probes.
    The first token of a request that was sent since it opened closes it.

    There are two kinds of failures. An endpoint without a connection, or that answers 503, is unavailable,
    whoever asks. What fails otherwise (5xx, an error event, malformed content, a broken connection, a
    time-out) may be due to the request. So these failures count by client: those of one or two clients do not
    open the breaker while the endpoint serves others, nor do those of a client whose requests have failed
    elsewhere before (:class:`FailingClients`).

    4xx and clients that disconnect are no failures. Times are seconds of any monotonic clock.
    """

    _clients: FailingClients = field(default_factory=FailingClients)
    """Failing clients of all endpoints."""
    on_change: Callable[[], None] = lambda: None
    """Called when it opens or closes, and when its pause changes."""
    on_lost: Callable[[], None] = lambda: None
    """Called when a request has lost its connection, or got none."""
    _unavailable: int = 0
    _failures: int = 0
    """Both since the latest success."""
    _failed: dict[str, float] = field(default_factory=dict)
    _served: dict[str, float] = field(default_factory=dict)
    """Time of the latest failure of clients whose latest request has failed, and of the latest success of
    clients; the latest one last."""
    _request_count: float = 0.0
    _failure_count: float = 0.0
    """Recent requests and failures; both decay with time."""
    _counted_at: float = 0.0
    _opened_at: float = 0.0
    _open_until: float | None = None
    _closed_at: float | None = None
    _closed_by: float | None = None
    _open_s: float = FIRST_OPEN_S
    _avoids: bool = False
    """Whether the breaker was opened by failures after a connection: the endpoint is there."""
    _probes: int = 0
    """In flight."""
    _first_probe_at: float = 0.0
    _latest_probe_at: float = 0.0

    @property
    def closed(self) -> bool:
        return self._open_until is None

    @property
    def open_until(self) -> float | None:
        """End of the pause, after which there are probes; None: it is closed."""
        return self._open_until

    @property
    def avoids(self) -> bool:
        """Whether the breaker is open although connections are made."""
        return self._open_until is not None and self._avoids

    @property
    def opening(self) -> tuple[float, float, bool] | None:
        """When it opened, until when, and whether it only avoids; None: it is closed."""
        return None if self._open_until is None else (self._opened_at, self._open_until, self._avoids)

    @property
    def closed_by(self) -> float | None:
        """When the request was sent that has closed it; None: it is open, or has never been."""
        return self._closed_by if self.closed else None

    def open_as_reported(self, opened_at: float, until: float, *, avoids: bool) -> None:
        """Another worker's has opened. One that is open goes on by itself, and so does one that was closed
        since then."""
        if self.closed and (self._closed_at is None or self._closed_at < opened_at):
            self._open(opened_at, avoids=avoids)
            self._open_until = until

    def close_as_reported(self, sent_at: float, now: float) -> None:
        """A request of another worker, sent at ``sent_at``, has closed that one's. Without it a worker with
        few requests of its own would keep an endpoint out that works."""
        if self._open_until is not None and sent_at >= self._opened_at:
            self._close(now, sent_at)

    def allows(self, now: float) -> bool:
        """Whether a request may be sent."""
        if self._open_until is None:
            return True
        if now < self._open_until:
            return False
        if not self._probes or now - self._latest_probe_at >= LOST_PROBE_S:
            return True
        doubled = min((now - self._first_probe_at) / PROBE_GROWTH_S, MAX_PROBES)
        return self._probes < min(1 << int(doubled), MAX_PROBES)

    def request_sent(self, now: float) -> None:
        """A request is sent; in the half-open state it is a probe."""
        if not self._was_half_open(now):
            return
        if now - self._latest_probe_at >= LOST_PROBE_S:
            self._probes = 0
        if not self._probes:
            self._first_probe_at = now
        self._probes += 1
        self._latest_probe_at = now

    # -- what became of it

    def record_outcome(
        self, outcome: Outcome, now: float, sent_at: float, client: str = "", *, had_token: bool = False
    ) -> None:
        """A request that was sent at ``sent_at`` for ``client`` has ended with this outcome. ``had_token``:
        its first token was recorded as a success."""
        match outcome:
            case Outcome.NETWORK_ERROR | Outcome.MODEL_SERVER_ERROR | Outcome.CONTENT_ERROR:
                if outcome is Outcome.NETWORK_ERROR:
                    self.on_lost()
                self.record_failure(now, sent_at, client)
            case Outcome.CLIENT_ERROR if not self.avoids and self._was_half_open(sent_at):
                self._close(now, sent_at)  # it is there again
            case Outcome.CLIENT_ERROR | Outcome.CLIENT_DISCONNECT | Outcome.REJECTED:
                self.release_probe(sent_at)
            case _ if not had_token:
                self.record_success(now, sent_at, client)

    def release_probe(self, sent_at: float) -> None:
        """The request says nothing about the endpoint, for example because its client disconnected."""
        if self._was_half_open(sent_at):
            self._probes = max(0, self._probes - 1)

    def record_success(self, now: float, sent_at: float, client: str = "") -> None:
        """The first token has come, or the whole reply."""
        self._clients.served(client)
        self._count(now, failed=False)
        self._unavailable = self._failures = 0
        self._failed.pop(client, None)
        _remember(self._served, client, now)
        if self._open_until is not None and sent_at >= self._opened_at:
            self._close(now, sent_at)

    def record_unavailable(self, now: float, sent_at: float, *, connected: bool = False) -> None:
        """The endpoint took no request: no connection could be made, or it answered 503."""
        if not connected:
            self.on_lost()
        self._count(now, failed=True)
        self._unavailable += 1
        if self._was_half_open(sent_at):
            self._open_again(now, avoids=connected)
        elif (self.closed or (self.avoids and not connected)) and (
            self._unavailable >= CONSECUTIVE_FAILURES or self._fails_often()
        ):
            self._open(now, avoids=connected)

    def record_failure(self, now: float, sent_at: float, client: str = "") -> None:
        """The endpoint got the request, but gave no good reply."""
        responsible = self._clients.failed(client, self, now)
        _remember(self._failed, client, now)
        if not responsible and self._failing_clients(now) < CONSECUTIVE_FAILURES:
            self.release_probe(sent_at)
            return
        self._count(now, failed=True)
        self._failures += 1
        if self._was_half_open(sent_at):
            self._open_again(now, avoids=True)
        elif (
            self.closed
            and (self._failures >= CONSECUTIVE_FAILURES or self._fails_often())
            and not self._serves_others(now)
        ):
            self._open(now, avoids=True)

    def reached(self, now: float, began_at: float) -> None:
        """A connection that was not for a request was made since ``began_at``: what was away is there again,
        and gets a probe."""
        if self._open_until is not None and not self._avoids and began_at >= self._opened_at:
            self._open_until = min(self._open_until, now)
            self.on_change()

    # -- decisions

    def _fails_often(self) -> bool:
        return (
            self._request_count >= MIN_REQUESTS and self._failure_count >= FAILURE_RATIO * self._request_count
        )

    def _failing_clients(self, now: float) -> int:
        return sum(now - at < WINDOW_S for at in self._failed.values())

    def _serves_others(self, now: float) -> bool:
        """Whether clients without failures were served lately, and few clients had failures."""
        return self._failing_clients(now) < CONSECUTIVE_FAILURES and any(
            client not in self._failed and now - at < WINDOW_S for client, at in self._served.items()
        )

    def _was_half_open(self, at: float) -> bool:
        """Whether a request that was sent then is a probe: replies that started earlier do not count."""
        return self._open_until is not None and at >= self._open_until

    def _open(self, now: float, *, avoids: bool) -> None:
        if self.closed:
            again = self._closed_at is not None and now - self._closed_at < WINDOW_S
            self._open_s = min(2 * self._open_s, MAX_OPEN_S) if again else FIRST_OPEN_S
        self._opened_at, self._open_until = now, now + self._open_s
        self._probes, self._avoids = 0, avoids
        self.on_change()

    def _open_again(self, now: float, *, avoids: bool) -> None:
        self._open_s = min(2 * self._open_s, MAX_OPEN_S)
        self._open(now, avoids=avoids)

    def _close(self, now: float, sent_at: float) -> None:
        self._open_until, self._closed_at, self._closed_by = None, now, sent_at
        self._unavailable = self._failures = self._probes = 0
        self._failed.clear()
        self._request_count = self._failure_count = 0.0
        self.on_change()

    def _count(self, now: float, *, failed: bool) -> None:
        kept = 0.5 ** ((now - self._counted_at) / WINDOW_S)
        self._counted_at = now
        self._request_count = self._request_count * kept + 1.0
        self._failure_count = self._failure_count * kept + failed


def _remember(times: dict[str, float], client: str, now: float) -> None:
    times.pop(client, None)
    times[client] = now
    if len(times) > MAX_CLIENTS:
        del times[next(iter(times))]
