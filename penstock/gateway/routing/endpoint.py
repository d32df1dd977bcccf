"""One model server behind the gateway: its address, its scraped load, and the requests sent to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from penstock.gateway.responses.endpoint_failure import EndpointFailure, endpoint_failure, latest
from penstock.gateway.routing.backoff import Backoff
from penstock.gateway.routing.circuit_breaker import CircuitBreaker
from penstock.gateway.upstream.upstream import Upstream

STALE_S = 5.0
"""Seconds after which a scraped load is ignored."""
TTFT_WEIGHT = 0.1
"""Weight of the latest time to first token in the moving average."""
_set = object.__setattr__


@dataclass(frozen=True, slots=True)
class EndpointLoad:
    """Load that an endpoint reports in its /metrics."""

    waiting: int = 0
    running: int = 0
    kv_used: float = 0.0
    """Share of the KV cache in use, 0 to 1."""
    adapters: frozenset[str] = frozenset()
    """Names of the loaded LoRA adapters."""
    max_adapters: int = 0


Role = Literal["both", "prefill", "decode"]
"""What an endpoint computes: prompts for others, output for prompts that others may have computed, or whole
requests."""


@dataclass(slots=True, eq=False)
class Endpoint:
    """State of one endpoint. Compared by identity: an address removed and added again is another endpoint.

    Whoever keeps a copy of its state in a row watches it: every change of an attribute, of the circuit
    breaker or the backoff adds the row to that one's set of changed rows, and every request sent or ended,
    or time to first token, to its set of rows whose counts have changed.
    """

    _watchers: list[tuple[set[int], set[int], int]] = field(default_factory=list, init=False, repr=False)
    url: str
    """Scheme, host and port, and the path of the URL if it has one."""
    configured_url: str = ""
    """As the operator wrote it; its host may stand for several endpoints."""
    destination: str = ""
    """IP address and port, the form that Envoy takes; empty: unknown."""
    pool: str = ""
    """Name of its pool; empty: it is in none."""
    role: Role = "both"
    upstream: Upstream = field(default_factory=Upstream)
    """How it is reached, and as whom."""
    apis: frozenset[str] | None = None
    """Names of the APIs that it speaks; None: what clients send is relayed as it is."""
    several_models: bool = False
    """Whether the endpoint lists models that are not adapters or other names of one, so it may have limits
    for each."""
    removed: bool = False
    """Whether the endpoint has left the pool: it gets no more requests, and nothing is remembered of it."""
    load: EndpointLoad = field(default_factory=EndpointLoad)
    scraped_at: float | None = None
    """When ``load`` was scraped; None: never."""
    scrape_failures: int = 0
    """Consecutive failed scrapes."""
    reachable: bool = True
    """Whether the latest scrape got a connection."""
    scrapes_late: bool = False
    """The latest scrape took too long."""
    rejects_usage: bool = False
    """Whether the endpoint has rejected ``include_usage``."""
    reports_load: bool = True
    """False after a scrape without any known load metric."""
    in_flight: int = 0
    """Requests from this gateway, all its workers, that have not ended."""
    sent_since_scrape: int = 0
    """Requests in flight that the scraped load does not include yet."""
    in_flight_at_scrape: int = 0
    """Requests in flight when the load was scraped."""
    in_flight_tokens: int = 0
    """Prompt tokens (estimated) of the requests in flight."""
    own_in_flight: int = 0
    own_sent: int = 0
    own_tokens: int = 0
    """Requests in flight, requests since the scrape and tokens of this worker of the gateway alone."""
    on_count: Callable[[int, int, int], None] | None = None
    """Called with ``own_in_flight``, ``own_sent`` and ``own_tokens`` when they have changed."""
    ttft_s: float | None = None
    """Moving average of the time to first token."""
    held: str = ""
    """Why it gets no requests although it takes them: it lacks what was set meanwhile; empty: it gets
    some."""
    drained: bool = False
    """Whether an administrator has drained it: it gets no new requests, those that run end."""
    opened: frozenset[str] = frozenset()
    """States that were set to have it refuse requests, and that it is not in: somebody has opened it
    directly."""
    failures: tuple[EndpointFailure, ...] = ()
    """The latest ones of all workers, in order of time."""
    on_failure: Callable[[EndpointFailure], None] = lambda failure: None
    """Called with each failure that this worker has seen."""
    on_lost: Callable[[], None] = lambda: None
    """Called when a connection breaks, or cannot be made: the server may be another one from here on."""
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    backoff: Backoff = field(default_factory=Backoff)

    def __post_init__(self) -> None:
        self.breaker.on_change = self.backoff.on_change = self._notify
        self.breaker.on_lost = lambda: self.on_lost()

    def __setattr__(self, name: str, value: object) -> None:
        _set(self, name, value)
        for changed, _, row in self._watchers:
            changed.add(row)

    def _notify(self) -> None:
        for changed, _, row in self._watchers:
            changed.add(row)

    def _mark_counted(self) -> None:
        for _, counted, row in self._watchers:
            counted.add(row)

    def refused(self, status: int, wait_s: float, client: str, model: str, now: float) -> None:
        """Note that the endpoint answered a request with this status, to come back in ``wait_s`` seconds."""
        self.backoff.refused(status, wait_s, client, now, model if self.several_models else "")

    def watch(self, changed: set[int], counted: set[int], row: int) -> None:
        """From here on ``row`` is added to ``counted`` with what a request changes, and to ``changed`` when
        anything else changes."""
        self._watchers.append((changed, counted, row))

    def unwatch(self, changed: set[int]) -> None:
        self._watchers = [each for each in self._watchers if each[0] is not changed]

    @property
    def is_up(self) -> bool:
        """Whether its breaker is closed and its scrapes do not fail."""
        return self.breaker.closed and self.is_readable

    @property
    def is_readable(self) -> bool:
        """Whether its latest scrapes did not both fail."""
        return self.scrape_failures < 2

    @property
    def reported_load(self) -> EndpointLoad | None:
        """The load that it tells; None: it tells none, or is down, so that its latest is an old one."""
        return self.load if self.scraped_at is not None and self.is_readable else None

    @property
    def is_away(self) -> bool:
        """Whether requests would get no connection: its latest scrapes got none, or it was removed."""
        return self.removed or not (self.is_readable or self.reachable)

    @property
    def is_withheld(self) -> bool:
        """Whether it gets no requests although it would take them."""
        return self.drained or bool(self.held)

    def is_ready(self, now: float) -> bool:
        """Whether it may be expected to take a request."""
        return self.is_there(now) and not self.drained

    def is_there(self, now: float) -> bool:
        """Whether it may be expected to take a request that no other endpoint can take: one that is drained
        takes those for its stored responses."""
        return (self.breaker.allows(now) or self.breaker.avoids) and not (self.is_away or self.held)

    def scrape_succeeded(self, load: EndpointLoad, now: float) -> None:
        """``load`` was asked for at ``now``."""
        self.load, self.scraped_at, self.scrape_failures = load, now, 0
        self.sent_since_scrape = self.own_sent = 0
        self.in_flight_at_scrape = self.in_flight
        self.reports_load, self.scrapes_late = True, False
        if self.on_count is not None:
            self.on_count(self.own_in_flight, self.own_sent, self.own_tokens)

    def scrape_had_no_load(self) -> None:
        """The endpoint is up but reports no load; only the requests in flight are known."""
        self.load, self.scraped_at, self.scrape_failures = EndpointLoad(), None, 0
        self.reports_load = False

    def scrape_was_late(self) -> None:
        """The endpoint is there, and busy: its latest load stays, and becomes stale."""
        self.reachable = self.scrapes_late = True

    def scrape_failed(self, *, connected: bool = True) -> None:
        self.scrape_failures += 1
        self.reachable = connected
        self.on_lost()

    def fresh_load(self, now: float) -> EndpointLoad | None:
        """The scraped load; None when it is stale."""
        if self.scraped_at is None or now - self.scraped_at > STALE_S:
            return None
        return self.load

    def waiting(self, now: float) -> int:
        """Requests that wait there, as far as is known: where some do, those that were sent since do as
        well."""
        load = self.fresh_load(now)
        return load.waiting + self.sent_since_scrape if load is not None and load.waiting else 0

    # -- requests

    def request_sent(self, tokens: int, now: float) -> None:
        self._count(1, tokens)
        self.breaker.request_sent(now)

    def request_ended(self, tokens: int) -> None:
        self._count(-1, -tokens)

    def _count(self, requests: int, tokens: int) -> None:
        """So many more requests are in flight, and tokens of their prompts; the watchers are told once."""
        in_flight, own = self.in_flight + requests, self.own_in_flight + requests
        sent, own_sent = self.sent_since_scrape + (requests > 0), self.own_sent + (requests > 0)
        _set(self, "in_flight", in_flight)
        _set(self, "own_in_flight", own)
        _set(self, "sent_since_scrape", min(sent, in_flight))
        _set(self, "own_sent", min(own_sent, own))
        _set(self, "in_flight_tokens", self.in_flight_tokens + tokens)
        _set(self, "own_tokens", self.own_tokens + tokens)
        self._mark_counted()
        if self.on_count is not None:
            self.on_count(own, self.own_sent, self.own_tokens)

    def request_lost(self) -> None:
        """Called before :meth:`request_ended` if it is not known to have ended: what the latest scrape counts
        stays."""
        self.in_flight_at_scrape = max(self.in_flight_at_scrape - 1, 0)

    def count_elsewhere(self, in_flight: int, sent: int, tokens: int) -> None:
        """What the other workers together have sent: requests in flight, those of them that the scraped load
        does not include, and their prompt tokens."""
        self.in_flight = self.own_in_flight + in_flight
        self.sent_since_scrape = self.own_sent + sent
        self.in_flight_tokens = self.own_tokens + tokens

    def note_failure(self, outcome: str, reason: str, status: int = 0, request_id: str = "") -> None:
        """Something has failed at the endpoint; ``status`` is its own, 0: none."""
        failure = endpoint_failure(outcome, reason, status, request_id)
        self.learn_failure(failure)
        self.on_failure(failure)

    def learn_failure(self, failure: EndpointFailure) -> None:
        """What this worker or another one has seen."""
        _set(self, "failures", latest(self.failures, failure))

    def add_ttft(self, ttft_s: float) -> None:
        """Add a time to first token to the moving average."""
        before = ttft_s if self.ttft_s is None else self.ttft_s
        _set(self, "ttft_s", before + TTFT_WEIGHT * (ttft_s - before))
        self._mark_counted()
