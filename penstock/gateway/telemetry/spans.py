"""Spans of requests for an OpenTelemetry collector, exported by a thread that the relay never waits for.

A span is created from the record of a request that has ended. Attributes follow OpenTelemetry's semantic
conventions for generative AI and for HTTP; others start with ``penstock.``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from penstock import __version__
from penstock.config.errors import ConfigError
from penstock.distribution import pip_install
from penstock.gateway.relay.request_record import RequestRecord
from penstock.gateway.responses.outcome import SUCCESSFUL
from penstock.gateway.responses.token_usage import TokenUsage

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger(__name__)

MOST_WAITING = 2048
"""Most spans in the queue; when it is full, spans are dropped."""
BATCH = 32
"""Spans exported at once. Encoding one takes 60 microseconds, during which Python's lock blocks the relay."""
INTERVAL_S = 1.0
"""Seconds that a span waits for its batch to fill."""
CLOSE_S = 2.0
"""Seconds to export the queue when the gateway exits."""
TRACES_PATH = "/v1/traces"

_OPERATIONS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat", "/v1/responses": "chat"}
_PROVIDERS = {"/v1/messages": "anthropic"}


@dataclass(frozen=True, slots=True)
class SpanData:
    """Contents of a span. Times are seconds of the relay's clock."""

    name: str
    attributes: dict[str, str | int | float | bool]
    events: list[tuple[str, float, dict[str, str]]]
    """Name, time, attributes."""
    error: str | None
    """Why the request failed; None: it succeeded."""


def span_data(record: RequestRecord) -> SpanData:
    """The contents of the span of a request that has ended."""
    seen, usage = record.seen, record.seen.usage or TokenUsage()
    operation = _OPERATIONS.get(record.path, "chat" if record.path in _PROVIDERS else None)
    endpoint = urlsplit(record.endpoint if "//" in record.endpoint else f"//{record.endpoint}")
    good = record.outcome in SUCCESSFUL
    ttft = None if seen.first_token_at is None else seen.first_token_at - record.began_at
    attributes: dict[str, str | int | float | bool | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": operation and _PROVIDERS.get(record.path, "openai"),
        "gen_ai.request.model": record.model or None,
        "gen_ai.response.model": record.target_model or None,
        "gen_ai.request.stream": True if record.streamed else None,
        "gen_ai.usage.input_tokens": usage.input_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.response.time_to_first_chunk": ttft,
        "http.request.method": record.method or None,
        "url.path": record.path,
        "http.request.body.size": record.bytes_in,
        "http.response.body.size": record.bytes_out,
        "http.response.status_code": record.status or None,
        "server.address": endpoint.hostname,
        "server.port": endpoint.port,
        "error.type": None if good else record.outcome.value,
        "penstock.outcome": record.outcome.value,
        "penstock.reason": record.reason or None,
        "penstock.request_id": record.request_id or None,
        "penstock.attempts": record.attempts,
    }
    events: list[tuple[str, float, dict[str, str]]] = []
    for failure in record.failures:
        about = {
            "endpoint": failure.endpoint,
            "error.type": failure.outcome.value,
            "reason": failure.reason,
        }
        events.append(("retry", failure.at, about))
    if seen.first_token_at is not None:
        events.append(("first_token", seen.first_token_at, {}))
    name = f"{operation} {record.model}" if operation else record.method or "HTTP"
    present = {key: value for key, value in attributes.items() if value is not None}
    return SpanData(name, present, events, None if good else record.reason or record.outcome.value)


class BatchSpanExporter:
    """Exports the spans of ended requests in batches. Its thread runs from construction to :meth:`close`."""

    def __init__(
        self,
        exporter: SpanExporter,
        make: Callable[[Iterable[RequestRecord]], list[ReadableSpan]],
        *,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self.counts: Counter[str] = Counter(exported=0, failed=0, dropped=0)
        """Spans by state: exported, failed, dropped."""
        self._exporter = exporter
        self._make = make
        self._most_waiting = most_waiting
        self._waiting: deque[RequestRecord] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def add(self, record: RequestRecord) -> None:
        """Queue a request's span; never waits. Drops it when the queue is full."""
        if record.trace is None or record.trace.span_id is None or not record.trace.sampled:
            return
        if len(self._waiting) >= self._most_waiting:
            self.counts["dropped"] += 1
            return
        self._waiting.append(record)
        if len(self._waiting) >= BATCH:
            self._wake.set()

    def close(self) -> None:
        """Export the queue, for at most :data:`CLOSE_S` seconds."""
        self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("not all spans were exported: the collector does not answer")
        self._exporter.shutdown()

    # -- the thread

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(INTERVAL_S)
            self._wake.clear()
            self._send_all()
        self._send_all()

    def _send_all(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
            self._send(batch)

    def _send(self, batch: list[RequestRecord]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(self._make(batch))
        except Exception:
            log.exception("%d spans were not exported", len(batch))
        self.counts["exported" if result is SpanExportResult.SUCCESS else "failed"] += len(batch)


def make_span_exporter(url: str, service_name: str) -> BatchSpanExporter:
    """Exporter to the collector at ``url`` (OTLP over HTTP; the default path is :data:`TRACES_PATH`).
    Raises ConfigError when the libraries are missing."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
    except ModuleNotFoundError as error:
        raise ConfigError(f"--otlp-endpoint needs the package {error.name}: {pip_install('otel')}") from None
    parts = urlsplit(url)
    endpoint = url if parts.path.strip("/") else parts._replace(path=TRACES_PATH).geturl()
    resource = Resource.create({"service.name": service_name, "service.version": __version__})

    def make(records: Iterable[RequestRecord]) -> list[ReadableSpan]:
        epoch = time.time() - time.monotonic()  # event loops use the monotonic clock
        return [span_of(record, resource, epoch) for record in records]

    return BatchSpanExporter(OTLPSpanExporter(endpoint), make)


def span_of(record: RequestRecord, resource: Resource, epoch: float) -> ReadableSpan:
    """The span of a request that has ended; ``epoch`` is the Unix time of the relay clock's zero."""
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    trace, data = record.trace, span_data(record)
    assert trace is not None, "only traced requests have spans"
    assert trace.span_id is not None
    trace_id = trace.trace_id

    def nanoseconds(at: float) -> int:
        return int((epoch + at) * 1e9)

    def context(span_id: int, *, is_remote: bool) -> SpanContext:
        return SpanContext(trace_id, span_id, is_remote, TraceFlags(TraceFlags.SAMPLED))

    return ReadableSpan(
        data.name,
        context(trace.span_id, is_remote=False),
        None if trace.parent_id is None else context(trace.parent_id, is_remote=True),
        resource,
        data.attributes,
        [Event(name, attributes, nanoseconds(at)) for name, at, attributes in data.events],
        kind=SpanKind.SERVER,
        status=Status(StatusCode.UNSET) if data.error is None else Status(StatusCode.ERROR, data.error),
        start_time=nanoseconds(record.began_at),
        end_time=nanoseconds(record.ended_at),
        instrumentation_scope=InstrumentationScope("penstock.gateway", __version__),
    )
