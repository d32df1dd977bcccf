"""An OpenTelemetry collector that keeps what it is sent."""

from __future__ import annotations

import gzip
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from typing import Any, Self

import pytest

from tests.gateway.processes import eventually

otel = pytest.mark.skipif(find_spec("opentelemetry") is None, reason="needs the extra otel")


class Collector:
    """Takes OTLP over HTTP, as protobuf; answers ``status``."""

    def __init__(self, status: int = 200) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.paths: Counter[str] = Counter()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
                    ExportTraceServiceRequest,
                )

                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    owner.services.add(attributes_of(resource.resource)["service.name"])
                    owner.spans += [span for scope in resource.scope_spans for span in scope.spans]
                owner.paths[self.path] += 1
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                """Not to standard error."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

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
