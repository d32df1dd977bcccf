"""The metrics of one API server, named as vLLM names them so that its dashboards and gateways read them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from .histogram import E2E_BOUNDS, EVENT_BOUNDS, ITL_BOUNDS, TOKEN_BOUNDS, TTFT_BOUNDS, Histogram

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"


@dataclass(slots=True, frozen=True)
class EngineGauges:
    """One engine's load, as its latest frame said."""

    rank: int
    up: bool
    draining: bool
    waiting: int
    running: int
    kv_used: float
    """0 to 1"""


@dataclass(slots=True)
class ServerMetrics:
    """Counters since the process started; histograms in seconds or tokens."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    frames: int = 0
    frames_merged: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    """Ended requests by reason: stop, length, abort, error, cut."""
    rejected: Counter[int] = field(default_factory=Counter)
    """Requests answered with an error status, by status."""
    interrupted: Counter[str] = field(default_factory=Counter)
    """Streams that lost their engine, by what became of them: resumed, expired, given_up, ended."""
    refused: Counter[str] = field(default_factory=Counter)
    """Requests that found no room or no engine, by the code of their error."""
    unknown_fields: Counter[str] = field(default_factory=Counter)
    """Request fields that were ignored because nobody knows them."""
    ttft: Histogram = field(default_factory=lambda: Histogram(TTFT_BOUNDS))
    itl: Histogram = field(default_factory=lambda: Histogram(ITL_BOUNDS))
    e2e: Histogram = field(default_factory=lambda: Histogram(E2E_BOUNDS))
    event_tokens: Histogram = field(default_factory=lambda: Histogram(EVENT_BOUNDS))
    """Tokens per row of streamed replies."""
    request_prompt_tokens: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS))
    request_generation_tokens: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS))

    def exposition(self, model: str, engines: list[EngineGauges], connections: int, streams: int) -> bytes:
        """The text of ``/metrics``."""
        registry = CollectorRegistry()
        registry.register(_Snapshot(self, model, engines, connections, streams))
        return generate_latest(registry)


class _Snapshot(Collector):
    def __init__(
        self, metrics: ServerMetrics, model: str, engines: list[EngineGauges], connections: int, streams: int
    ) -> None:
        self._metrics = metrics
        self._model = model
        self._engines = engines
        self._connections = connections
        self._streams = streams

    def collect(self) -> Iterator[Metric]:
        yield from self._engine_gauges()
        yield from self._counters()
        yield from self._histograms()
        yield from self._own()

    def _engine_gauges(self) -> Iterator[Metric]:
        labels = ["model_name", "engine"]
        running = GaugeMetricFamily(
            "vllm:num_requests_running", "Streams that run in the engine.", labels=labels
        )
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting", "Streams that wait for a slot.", labels=labels
        )
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of the KV cache in use.", labels=labels)
        up = GaugeMetricFamily("penstock:engine_up", "1 while the engine takes requests.", labels=labels)
        draining = GaugeMetricFamily(
            "penstock:engine_draining", "1 while the engine gets no new streams by order.", labels=labels
        )
        for engine in self._engines:
            names = [self._model, str(engine.rank)]
            running.add_metric(names, engine.running)
            waiting.add_metric(names, engine.waiting)
            usage.add_metric(names, engine.kv_used)
            up.add_metric(names, float(engine.up))
            draining.add_metric(names, float(engine.draining))
        yield from (running, waiting, usage, up, draining)

    def _counters(self) -> Iterator[Metric]:
        metrics = self._metrics
        for name, text, value in (
            ("vllm:prompt_tokens", "Prompt tokens of ended requests.", metrics.prompt_tokens),
            ("vllm:generation_tokens", "Tokens delivered.", metrics.generation_tokens),
            ("penstock:token_frames", "Token frames received.", metrics.frames),
            ("penstock:token_frames_merged", "Frames merged into an earlier one.", metrics.frames_merged),
        ):
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
        success = CounterMetricFamily(
            "vllm:request_success",
            "Requests that ended, by reason.",
            labels=["model_name", "finished_reason"],
        )
        for reason in sorted({"stop", "length", "abort", "error", *metrics.requests}):
            success.add_metric([self._model, reason], metrics.requests[reason])
        yield success

    def _histograms(self) -> Iterator[Metric]:
        metrics = self._metrics
        for name, text, histogram in (
            ("vllm:time_to_first_token_seconds", "From the request to its first token.", metrics.ttft),
            ("vllm:inter_token_latency_seconds", "Between a stream's events.", metrics.itl),
            ("vllm:e2e_request_latency_seconds", "From the request to its end.", metrics.e2e),
            (
                "penstock:stream_event_tokens",
                "Tokens per event of streamed replies: the interval in effect.",
                metrics.event_tokens,
            ),
            ("vllm:request_prompt_tokens", "Prompt tokens per request.", metrics.request_prompt_tokens),
            ("vllm:request_generation_tokens", "Tokens per request.", metrics.request_generation_tokens),
        ):
            family = HistogramMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._model], histogram.cumulative(), histogram.total)
            yield family

    def _own(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("penstock:connections", "Open client connections.", value=self._connections)
        yield GaugeMetricFamily(
            "penstock:streams", "Streams with a handle, ending ones included.", value=self._streams
        )
        interrupted = CounterMetricFamily(
            "penstock:streams_interrupted",
            "Streams that lost their engine, by what became of them.",
            labels=["outcome"],
        )
        for outcome in sorted({"resumed", "expired", "given_up", "ended", *self._metrics.interrupted}):
            interrupted.add_metric([outcome], self._metrics.interrupted[outcome])
        yield interrupted
        rejected = CounterMetricFamily(
            "penstock:requests_rejected", "Requests answered with an error status.", labels=["status"]
        )
        for status, count in sorted(self._metrics.rejected.items()):
            rejected.add_metric([str(status)], count)
        yield rejected
        refused = CounterMetricFamily(
            "penstock:requests_refused", "Requests that found no room or no engine.", labels=["reason"]
        )
        for reason in sorted({"draining", "no_engine", "overloaded", *self._metrics.refused}):
            refused.add_metric([reason], self._metrics.refused[reason])
        yield refused
        unknown = CounterMetricFamily(
            "penstock:unknown_request_fields", "Request fields ignored as unknown.", labels=["field"]
        )
        for name, count in sorted(self._metrics.unknown_fields.items()):
            unknown.add_metric([name], count)
        yield unknown
