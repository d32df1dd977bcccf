"""Spans for an OpenTelemetry collector, exported by a thread that nothing waits for.

A process hands over the record of each request that has ended; the thread makes a span of it. Attributes
follow OpenTelemetry's semantic conventions for generative AI and for HTTP; others start with ``penstock.``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeAlias, TypeVar
from urllib.parse import urlsplit

from penstock import __version__
from penstock.config.errors import ConfigError
from penstock.distribution import pip_install
from penstock.logging_setup import RateLimitedLog
from penstock.telemetry.trace_context import TraceContext

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger(__name__)
_warn = RateLimitedLog(log)

MAX_WAITING = 2048
"""Most spans in the queue; when it is full, spans are dropped."""
BATCH = 32
"""Spans exported at once. Encoding one takes 60 microseconds, in which Python's lock blocks the process."""
INTERVAL_S = 1.0
"""Seconds that a span waits for its batch to fill."""
CLOSE_S = 2.0
"""Seconds to export the queue when the process exits."""
TRACES_PATH = "/v1/traces"

OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    **dict.fromkeys(("/v1/embeddings", "/v1/embed", "/v2/embed"), "embeddings"),
}
"""gen_ai.operation.name by path."""
PROVIDERS = {"/v1/messages": "anthropic", "/v1/embed": "cohere", "/v2/embed": "cohere"}
"""gen_ai.provider.name by path: whose API it is; of all others, OpenAI's."""
Attribute: TypeAlias = str | int | float | bool | Sequence[str]


@dataclass(frozen=True, slots=True)
class SpanData:
    """Contents of a span. Times are seconds of the monotonic clock."""

    name: str
    attributes: dict[str, Attribute]
    events: list[tuple[str, float, dict[str, Attribute]]]
    """Name, time, attributes."""
    error: str | None
    """Why the request failed; None: it succeeded."""
    kind: Literal["server", "internal"] = "server"


def present(attributes: dict[str, Attribute | None]) -> dict[str, Attribute]:
    """The attributes that have a value."""
    return {key: value for key, value in attributes.items() if value is not None}


class SpanRecord(Protocol):
    """What a span is made of. Times are seconds of the monotonic clock."""

    @property
    def trace(self) -> TraceContext | None: ...

    @property
    def began_at(self) -> float: ...

    @property
    def ended_at(self) -> float: ...


RecordT = TypeVar("RecordT", bound=SpanRecord)


class BatchSpanExporter(Generic[RecordT]):
    """Exports the spans of ended requests in batches. Its thread runs from construction to :meth:`close`."""

    def __init__(
        self,
        exporter: SpanExporter,
        make: Callable[[Iterable[RecordT]], list[ReadableSpan]],
        *,
        most_waiting: int = MAX_WAITING,
    ) -> None:
        self.counts: Counter[str] = Counter(exported=0, failed=0, dropped=0)
        """Spans by state: exported, failed, dropped."""
        self._exporter = exporter
        self._make = make
        self._most_waiting = most_waiting
        self._waiting: deque[RecordT] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def add(self, record: RecordT) -> None:
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

    def _send(self, batch: list[RecordT]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(self._make(batch))
        except Exception:
            log.exception("%d spans were not exported", len(batch))
        self.counts["exported" if result is SpanExportResult.SUCCESS else "failed"] += len(batch)


class _LibraryLog(logging.Handler):
    """Logs what OpenTelemetry's library says, once a minute of each kind: it has a line and more for each
    batch that a collector does not take."""

    def emit(self, record: logging.LogRecord) -> None:
        _warn(str(record.msg), "%s", record.getMessage())


def check_tracing(url: str) -> None:
    """Raise ConfigError for a collector's URL without a valid port, and when the libraries for spans are
    missing."""
    try:
        urlsplit(url).port  # noqa: B018
    except ValueError as error:
        raise ConfigError(f"--otlp-endpoint {url}: {error}") from None
    try:
        missing = find_spec("opentelemetry.exporter.otlp.proto.http") is None
    except ModuleNotFoundError:
        missing = True
    if missing:
        raise ConfigError(f"--otlp-endpoint needs the package opentelemetry: {pip_install('otel')}")


def signal_url(url: str, path: str) -> str | None:
    """Where a collector at ``url`` takes a signal whose default path is ``path``. A path in ``url`` is that
    of spans: None if it does not tell where other signals go."""
    parts = urlsplit(url)
    if path == TRACES_PATH and parts.path.strip("/"):
        return url
    if parts.path.strip("/") and not parts.path.endswith(TRACES_PATH):
        return None
    return parts._replace(path=parts.path.rstrip("/").removesuffix(TRACES_PATH) + path).geturl()


def resource_of(service: str, instance: str) -> Resource:
    """What is exported by: ``instance`` is a process, and no other one of the service has its name. The
    library's own log lines are rare from here on."""
    from opentelemetry.sdk.resources import Resource

    library = logging.getLogger("opentelemetry")
    library.handlers[:], library.propagate = [_LibraryLog()], False
    about = {"service.name": service, "service.version": __version__, "service.instance.id": instance}
    return Resource.create(about)


def make_span_exporter(
    url: str, describe: Callable[[RecordT], SpanData], *, service: str, scope: str, instance: str
) -> BatchSpanExporter[RecordT]:
    """Exporter to the collector at ``url`` (OTLP over HTTP; the default path is :data:`TRACES_PATH`).

    ``describe`` makes spans of records, in the exporter's thread. ``scope`` names the instrumented part,
    ``instance`` the process. Raises ConfigError as :func:`check_tracing` does.
    """
    check_tracing(url)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    from penstock.telemetry.collector_session import collector_session

    resource = resource_of(service, instance)

    def make(records: Iterable[RecordT]) -> list[ReadableSpan]:
        epoch = time.time() - time.monotonic()
        return [_span(record, describe(record), resource, scope, epoch) for record in records]

    exporter = OTLPSpanExporter(signal_url(url, TRACES_PATH), session=collector_session())
    return BatchSpanExporter(exporter, make)


def _span(record: SpanRecord, data: SpanData, resource: Resource, scope: str, epoch: float) -> ReadableSpan:
    """The span of a record; ``epoch`` is the Unix time of the monotonic clock's zero."""
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

    trace = record.trace
    assert trace is not None, "only traced requests have spans"
    assert trace.span_id is not None
    trace_id, state = trace.trace_id, TraceState.from_header([trace.state])

    def nanoseconds(at: float) -> int:
        return int((epoch + at) * 1e9)

    def context(span_id: int, *, is_remote: bool) -> SpanContext:
        return SpanContext(trace_id, span_id, is_remote, TraceFlags(TraceFlags.SAMPLED), state)

    return ReadableSpan(
        data.name,
        context(trace.span_id, is_remote=False),
        None if trace.parent_id is None else context(trace.parent_id, is_remote=True),
        resource,
        data.attributes,
        [Event(name, attributes, nanoseconds(at)) for name, at, attributes in data.events],
        kind=SpanKind.SERVER if data.kind == "server" else SpanKind.INTERNAL,
        status=Status(StatusCode.UNSET) if data.error is None else Status(StatusCode.ERROR, data.error),
        start_time=nanoseconds(record.began_at),
        end_time=nanoseconds(record.ended_at),
        instrumentation_scope=InstrumentationScope(scope, __version__),
    )
