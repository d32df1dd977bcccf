"""An OpenTelemetry collector that keeps what it is sent."""

from __future__ import annotations

import gzip
import threading
from collections import Counter
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from typing import Any, Self

import pytest

from tests.gateway.processes import eventually

otel = pytest.mark.skipif(find_spec("opentelemetry") is None, reason="needs the extra otel")


class Collector:
    """Takes OTLP over HTTP, as protobuf; answers ``status``, and ``answer``."""

    def __init__(self, status: int = 200, answer: bytes = b"") -> None:
        self.spans: list[Any] = []
        self.metrics: list[tuple[dict[str, Any], Any]] = []
        """Attributes of the resource, and the metric; in the order in which they came."""
        self.services: set[str] = set()
        self.paths: Counter[str] = Counter()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                owner.take(self.path, body)
                owner.paths[self.path] += 1
                self.send_response(status)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                with suppress(ConnectionError):  # a client need not read all of it
                    self.wfile.write(answer)

            def log_message(self, *args: object) -> None:
                """Not to standard error."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def take(self, path: str, body: bytes) -> None:
        """Raises DecodeError for what is no message of the signal."""
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        if path.endswith("/v1/metrics"):
            for sent in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                about = attributes_of(sent.resource)
                self.metrics += [(about, metric) for scope in sent.scope_metrics for metric in scope.metrics]
            return
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services.add(attributes_of(resource.resource)["service.name"])
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]

    def points(self, name: str) -> list[tuple[dict[str, Any], Any]]:
        """Attributes and latest point of each series of a histogram, over all instances."""
        latest: dict[Any, tuple[dict[str, Any], Any]] = {}
        for about, metric in self.metrics:
            if metric.name == name:
                for point in metric.histogram.data_points:
                    told = attributes_of(point)
                    key = about["service.name"], about["service.instance.id"], *sorted(told.items())
                    latest[key] = told, point
        return list(latest.values())

    def count(self, name: str, **attributes: Any) -> int:
        """Observations in a histogram, over all instances and series with these attributes, whose dots are
        two underscores here."""
        wanted = {key.replace("__", "."): value for key, value in attributes.items()}
        return sum(point.count for told, point in self.points(name) if wanted.items() <= told.items())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def span_of(self, request_id: str) -> Any:
        """The one span of a request, once it has come."""

        def found() -> list[Any]:
            return [
                span for span in self.spans if attributes_of(span).get("penstock.request_id") == request_id
            ]

        eventually(lambda: bool(found()))
        [span] = found()
        return span


def attributes_of(thing: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in thing.attributes}
