"""The gateway's metrics: every request counted once, with its outcome."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..metrics.histogram import E2E_BOUNDS, ITL_BOUNDS, TTFT_BOUNDS
from .endpoint import Endpoint
from .outcome import Outcome
from .relay import Record

MOST_MODELS = 64
"""Model names with series of their own; clients make names up, and each would cost memory for ever."""
OTHER = "other"


class GatewayMetrics:
    """Latencies are recorded for all requests, whatever became of them, with the outcome as label."""

    def __init__(self, endpoints: Callable[[], list[Endpoint]], in_flight: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._models: set[str] = set()
        self._requests = self._counter("request", "Requests that ended.", "model", "outcome")
        self._rejections = self._counter("rejection", "Requests the gateway refused itself.", "reason")
        self._attempts = self._counter("retry", "Requests sent again to another endpoint.")
        self._tokens = self._counter(
            "tokens",
            "Tokens of ended requests: input, output, cached; source: the server's usage, or counted events.",
            "model",
            "kind",
            "source",
        )
        self._duration = self._histogram(
            "request_duration_seconds", "From the request to its end.", E2E_BOUNDS
        )
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "From the request to its first event with tokens.", TTFT_BOUNDS
        )
        self._tpot = self._histogram(
            "time_per_output_token_seconds", "Mean between a reply's first and last token.", ITL_BOUNDS
        )
        self._registry.register(_Gauges(endpoints, in_flight))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"penstock_gateway_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"penstock_gateway_{name}", text, ("model", "outcome"), registry=self._registry, buckets=bounds
        )

    def count(self, record: Record) -> None:
        """A request has ended."""
        model, outcome, seen = self._model(record), record.outcome.value, record.seen
        self._requests.labels(model, outcome).inc()
        if record.outcome is Outcome.REJECTED:
            self._rejections.labels(record.reason).inc()
        self._attempts.inc(max(0, record.attempts - 1))
        self._duration.labels(model, outcome).observe(record.ended_at - record.began_at)
        output = self._count_tokens(record, model)
        if seen.first_token_at is not None and seen.last_token_at is not None:
            self._ttft.labels(model, outcome).observe(seen.first_token_at - record.began_at)
            if output > 1:
                took = seen.last_token_at - seen.first_token_at
                self._tpot.labels(model, outcome).observe(took / (output - 1))

    def _count_tokens(self, record: Record, model: str) -> int:
        """Returns the output tokens, as well as they are known."""
        usage, events = record.seen.usage, record.seen.token_events
        if usage is None or usage.output_tokens is None:
            if events:
                self._tokens.labels(model, "output", "events").inc(events)
            output = events
        else:
            self._tokens.labels(model, "output", "usage").inc(usage.output_tokens)
            output = usage.output_tokens
        if usage is not None:
            for kind, count in (("input", usage.input_tokens), ("cached", usage.cached_tokens)):
                if count:
                    self._tokens.labels(model, kind, "usage").inc(count)
        return output

    def _model(self, record: Record) -> str:
        if record.model in self._models:
            return record.model
        answered = record.outcome in (Outcome.OK, Outcome.OK_WITHOUT_USAGE)
        if not answered or len(self._models) >= MOST_MODELS:
            return OTHER  # nobody serves it, or there are too many
        self._models.add(record.model)
        return record.model

    def exposition(self) -> bytes:
        """The text of ``/metrics``."""
        return generate_latest(self._registry)


class _Gauges(Collector):
    def __init__(self, endpoints: Callable[[], list[Endpoint]], in_flight: Callable[[], int]) -> None:
        self._endpoints = endpoints
        self._in_flight = in_flight

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "penstock_gateway_requests_in_flight", "Requests being relayed.", value=self._in_flight()
        )
        in_flight = self._family("endpoint_in_flight", "Requests sent to the endpoint that have not ended.")
        waiting = self._family("endpoint_waiting", "Requests waiting at the endpoint, as it says.")
        running = self._family("endpoint_running", "Requests running at the endpoint, as it says.")
        kv_used = self._family("endpoint_kv_used", "Share of the endpoint's KV cache in use.")
        closed = self._family("endpoint_up", "1 unless the endpoint fails requests or cannot be read.")
        for endpoint in self._endpoints():
            name, load = [endpoint.url], endpoint.load
            in_flight.add_metric(name, endpoint.in_flight)
            waiting.add_metric(name, load.waiting)
            running.add_metric(name, load.running)
            kv_used.add_metric(name, load.kv_used)
            closed.add_metric(name, float(endpoint.breaker.closed and endpoint.scrape_failures < 2))
        yield from (in_flight, waiting, running, kv_used, closed)

    def _family(self, name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"penstock_gateway_{name}", text, labels=["endpoint"])
