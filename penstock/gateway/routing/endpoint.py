"""One model server behind the gateway: its address, its load as scraped, and what was sent to it."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.gateway.routing.circuit_breaker import CircuitBreaker

STALE_S = 5.0
"""A scraped load that is older says nothing any more."""
TTFT_WEIGHT = 0.1
"""Of the latest time to first token in the running mean."""


@dataclass(frozen=True, slots=True)
class EndpointLoad:
    """What an endpoint says about itself in its /metrics."""

    waiting: int = 0
    running: int = 0
    kv_used: float = 0.0
    """Share of the KV cache in use, 0 to 1."""
    adapters: frozenset[str] = frozenset()
    """LoRA adapters that are loaded."""
    max_adapters: int = 0


@dataclass(slots=True, eq=False)
class Endpoint:
    """Compared by identity: an address that is removed and added again is another endpoint."""

    url: str
    """Scheme, host and port; no path."""
    destination: str = ""
    """IP address and port, as Envoy takes it; empty: unknown."""
    load: EndpointLoad = field(default_factory=EndpointLoad)
    scraped_at: float | None = None
    """When ``load`` was read; None: never."""
    scrape_failures: int = 0
    """In a row."""
    reports_load: bool = True
    """As far as is known."""
    in_flight: int = 0
    """Requests sent by this gateway that have not ended."""
    sent_since_scrape: int = 0
    """Of those, the ones the scraped load cannot know yet."""
    in_flight_tokens: int = 0
    """Prompt tokens (estimated) of the requests in flight."""
    ttft_s: float | None = None
    """Running mean of the time to first token."""
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)

    @property
    def is_up(self) -> bool:
        """Neither failing requests nor unreadable."""
        return self.breaker.closed and self.scrape_failures < 2

    def is_ready(self, now: float, *, scraped: bool) -> bool:
        """Whether requests may be sent. ``scraped``: loads are read, and who cannot be read twice is down."""
        return self.breaker.allows(now) and not (scraped and self.scrape_failures >= 2)

    def scrape_succeeded(self, load: EndpointLoad, now: float) -> None:
        self.load, self.scraped_at, self.scrape_failures, self.sent_since_scrape = load, now, 0, 0
        self.reports_load = True

    def scrape_had_no_load(self) -> None:
        """It is there, but tells no load: what was sent to it is all that is known."""
        self.load, self.scraped_at, self.scrape_failures = EndpointLoad(), None, 0
        self.reports_load = False

    def scrape_failed(self) -> None:
        self.scrape_failures += 1

    def fresh_load(self, now: float) -> EndpointLoad | None:
        """The scraped load unless it is stale."""
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
        """A first token came."""
        before = ttft_s if self.ttft_s is None else self.ttft_s
        self.ttft_s = before + TTFT_WEIGHT * (ttft_s - before)
