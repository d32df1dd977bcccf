"""The counters and histograms of one API server; :mod:`.families` defines the metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.metrics import families as f
from penstock.metrics.ended_requests import EndedRequests
from penstock.metrics.histogram import Histogram
from penstock.metrics.media_metrics import MediaMetrics
from penstock.metrics.snapshot import Series, histogram_series
from penstock.metrics.store_metrics import StoreMetrics

OUTCOMES = ("stop", "length", "abort", "cut", "error")
REFUSALS = ("draining", "no_engine", "overloaded", "too_many_connections")
INTERRUPTIONS = ("resumed", "expired", "given_up", "ended")


class EngineRequests:
    """Requests that ended whose first choice ran on one engine."""

    def __init__(self) -> None:
        self.choices = Histogram(f.PARAMS_N.bounds)
        self.longest = Histogram(f.MAX_GENERATION_TOKENS.bounds)
        """Tokens of the longest choice."""

    def add(self, choices: int, longest: int) -> None:
        self.choices.add(choices)
        self.longest.add(longest)


@dataclass(slots=True)
class ApiServerMetrics:
    """Counters since the process started; histograms in seconds or tokens."""

    ended: EndedRequests = field(default_factory=EndedRequests)
    rejected: Counter[int] = field(default_factory=Counter)
    """Requests answered with an error status, by status."""
    interrupted: Counter[str] = field(default_factory=Counter)
    """Streams that lost their engine, by outcome."""
    refused: Counter[str] = field(default_factory=Counter)
    """Requests rejected for overload or for lack of an engine, by error code."""
    accept_pauses: int = 0
    """Times that no more connections were accepted for want of descriptors."""
    ttft: Histogram = field(default_factory=lambda: Histogram(f.CLIENT_TTFT.bounds))
    itl: Histogram = field(default_factory=lambda: Histogram(f.CLIENT_ITL.bounds))
    event_tokens: Histogram = field(default_factory=lambda: Histogram(f.EVENT_TOKENS.bounds))
    """Tokens per row of streamed replies."""
    loop_lag: Histogram = field(default_factory=lambda: Histogram(f.LOOP_LAG.bounds))
    store: StoreMetrics | None = None
    """None: there is no response store."""
    media: MediaMetrics | None = None
    """None: the model takes no pictures."""
    _by_engine: dict[int, EngineRequests] = field(default_factory=dict)

    def requests_by_engine(self, rank: int) -> EngineRequests:
        found = self._by_engine.get(rank)
        if found is None:
            found = self._by_engine[rank] = EngineRequests()
        return found

    def reject(self, status: int, code: str | int | None) -> None:
        """Count a request that was answered with an error; ``code``: the error's code."""
        self.rejected[status] += 1
        if status in (429, 503):
            self.refused[str(code)] += 1

    def series(self, server: str, model: str) -> Iterator[Series]:
        """The current values; ``server`` and ``model``: values of the labels ``server`` and
        ``model_name``."""
        for rank, requests in self._by_engine.items():
            yield histogram_series(f.PARAMS_N, (model, str(rank)), requests.choices)
            yield histogram_series(f.MAX_GENERATION_TOKENS, (model, str(rank)), requests.longest)
        outcomes = Counter(dict.fromkeys(OUTCOMES, 0))
        for (api, outcome), count in self.ended.counts().items():
            outcomes[outcome] += count
            yield Series(f.API_REQUESTS.name, (server, api, outcome), count)
        for outcome, count in outcomes.items():
            yield Series(f.REQUESTS.name, (server, outcome), count)
        for status, count in self.rejected.items():
            yield Series(f.REJECTED.name, (server, str(status)), count)
        for outcome in dict.fromkeys((*INTERRUPTIONS, *self.interrupted)):
            yield Series(f.INTERRUPTED.name, (server, outcome), self.interrupted[outcome])
        for reason in dict.fromkeys((*REFUSALS, *self.refused)):
            yield Series(f.REFUSED.name, (server, reason), self.refused[reason])
        yield Series(f.ACCEPT_PAUSES.name, (server,), self.accept_pauses)
        yield histogram_series(f.CLIENT_TTFT, (server,), self.ttft)
        yield histogram_series(f.CLIENT_ITL, (server,), self.itl)
        yield Series(f.CLIENT_E2E.name, (server,), self.ended.durations())
        yield histogram_series(f.EVENT_TOKENS, (server,), self.event_tokens)
        yield histogram_series(f.LOOP_LAG, (server,), self.loop_lag)
        if self.store is not None:
            yield from self.store.series(server)
        if self.media is not None:
            yield from self.media.series(server)
