"""One model server behind the gateway: its address, its scraped load, and the requests sent to it."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.gateway.routing.circuit_breaker import CircuitBreaker

STALE_S = 5.0
"""Seconds after which a scraped load is ignored."""
TTFT_WEIGHT = 0.1
"""Weight of the latest time to first token in the moving average."""


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


@dataclass(slots=True, eq=False)
class Endpoint:
    """State of one endpoint. Compared by identity: an address removed and added again is another endpoint."""

    url: str
    """Scheme, host and port; no path."""
    destination: str = ""
    """IP address and port, the form that Envoy takes; empty: unknown."""
    load: EndpointLoad = field(default_factory=EndpointLoad)
    scraped_at: float | None = None
    """When ``load`` was scraped; None: never."""
    scrape_failures: int = 0
    """Consecutive failed scrapes."""
    reachable: bool = True
    """Whether the latest scrape got a connection."""
    reports_load: bool = True
    """False after a scrape without any known load metric."""
    in_flight: int = 0
    """Requests from this gateway that have not ended."""
    sent_since_scrape: int = 0
    """Requests in flight that the scraped load does not include yet."""
    in_flight_tokens: int = 0
    """Prompt tokens (estimated) of the requests in flight."""
    ttft_s: float | None = None
    """Moving average of the time to first token."""
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)

    @property
    def is_up(self) -> bool:
        """Whether its breaker is closed and its scrapes succeed."""
        return self.breaker.closed and self.is_readable

    @property
    def is_readable(self) -> bool:
        """Whether its latest scrapes did not both fail."""
        return self.scrape_failures < 2

    def is_ready(self, now: float) -> bool:
        """Whether requests may be sent, if there is no better endpoint. Scrapes exclude an endpoint only if
        they get no connection, as then requests would get none."""
        return (self.breaker.allows(now) or self.breaker.avoids) and (self.is_readable or self.reachable)

    def scrape_succeeded(self, load: EndpointLoad, now: float) -> None:
        self.load, self.scraped_at, self.scrape_failures, self.sent_since_scrape = load, now, 0, 0
        self.reports_load = True

    def scrape_had_no_load(self) -> None:
        """The endpoint is up but reports no load; only the requests in flight are known."""
        self.load, self.scraped_at, self.scrape_failures = EndpointLoad(), None, 0
        self.reports_load = False

    def scrape_failed(self, *, connected: bool = True) -> None:
        self.scrape_failures += 1
        self.reachable = connected

    def fresh_load(self, now: float) -> EndpointLoad | None:
        """The scraped load; None when it is stale."""
        if self.scraped_at is None or now - self.scraped_at > STALE_S:
            return None
        return self.load

    # -- requests

    def request_sent(self, tokens: int, now: float) -> None:
        self.in_flight += 1
        self.sent_since_scrape += 1
        self.in_flight_tokens += tokens
        self.breaker.request_sent(now)

    def request_ended(self, tokens: int) -> None:
        self.in_flight -= 1
        self.sent_since_scrape = min(self.sent_since_scrape, self.in_flight)
        self.in_flight_tokens -= tokens

    def add_ttft(self, ttft_s: float) -> None:
        """Add a time to first token to the moving average."""
        before = ttft_s if self.ttft_s is None else self.ttft_s
        self.ttft_s = before + TTFT_WEIGHT * (ttft_s - before)
