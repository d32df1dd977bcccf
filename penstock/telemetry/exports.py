"""What a process sends to the collector of ``--otlp-endpoint``: spans of requests, and metrics."""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Generic, Protocol

from penstock.telemetry.gen_ai_metrics import Point
from penstock.telemetry.metric_export import MetricExport
from penstock.telemetry.spans import (
    Attribute,
    BatchSpanExporter,
    RecordT,
    SpanData,
    make_span_exporter,
    resource_of,
    signal_url,
)

log = logging.getLogger(__name__)

METRICS_PATH = "/v1/metrics"
ANYWHERE = ("0.0.0.0", "::", "")


class ExportOptions(Protocol):
    """The options of a server or a gateway that are read here."""

    @property
    def otlp_endpoint(self) -> str | None: ...
    @property
    def otlp_service_name(self) -> str: ...
    @property
    def otlp_metrics_interval(self) -> float: ...
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...


class Exports(Generic[RecordT]):
    """Nothing without ``--otlp-endpoint``: :attr:`spans` and :attr:`metrics` are None."""

    def __init__(
        self,
        options: ExportOptions,
        describe: Callable[[RecordT], SpanData],
        collect: Callable[[], Iterable[Point]],
        *,
        scope: str,
        instance: str,
        uds: str | None = None,
    ) -> None:
        """``describe`` makes spans of records, in a thread; ``collect`` yields what has been counted, on the
        event loop. ``scope`` names the instrumented part, ``instance`` the process, ``uds`` the socket that
        is listened on instead of a port. Raises ConfigError."""
        self.spans: BatchSpanExporter[RecordT] | None = None
        self.metrics: MetricExport | None = None
        if options.otlp_endpoint is None:
            return
        service = options.otlp_service_name
        self.spans = make_span_exporter(
            options.otlp_endpoint, describe, service=service, scope=scope, instance=instance
        )
        if not options.otlp_metrics_interval:
            return
        url = signal_url(options.otlp_endpoint, METRICS_PATH)
        if url is None:
            log.warning("no metrics are exported: the path of --otlp-endpoint does not end with /v1/traces")
            return
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        from penstock.telemetry.collector_session import collector_session

        self.metrics = MetricExport(
            OTLPMetricExporter(url, session=collector_session()),
            resource_of(service, instance),
            scope,
            collect,
            options.otlp_metrics_interval,
            _address(options, uds),
        )

    @property
    def span_counts(self) -> Counter[str] | None:
        """Spans by state: exported, failed, dropped; None: there are none."""
        return None if self.spans is None else self.spans.counts

    def running(self) -> list[Coroutine[Any, Any, None]]:
        """What the event loop has to run until it is cancelled."""
        return [] if self.metrics is None else [self.metrics.run()]

    def finish(self) -> None:
        """Take the last metrics. On the event loop, before :meth:`close`."""
        if self.metrics is not None:
            self.metrics.finish()

    def close(self) -> None:
        """Send what waits, for a little more than 2 seconds at most."""
        if self.spans is not None:
            self.spans.close()
        if self.metrics is not None:
            self.metrics.close()


def _address(options: ExportOptions, uds: str | None) -> dict[str, Attribute]:
    """Where clients find the server; nothing for a port that the system chooses."""
    if uds is not None:
        return {"server.address": uds}
    if not options.port:
        return {}
    host = socket.gethostname() if options.host in ANYWHERE else options.host
    return {"server.address": host, "server.port": options.port}
