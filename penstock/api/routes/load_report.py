"""The load of the engines in a reply's header, for load balancers that speak ORCA (Open Request Cost
Aggregation), such as Envoy and the Gateway API's endpoint pickers.

A request asks for it by ``endpoint-load-metrics-format: TEXT`` or ``JSON``; names and spelling are vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.dispatch.connections import EngineState
from penstock.http.errors import encode_json
from penstock.http.request import HttpRequest

FORMAT_HEADER = b"endpoint-load-metrics-format"
REPORT_HEADER = b"endpoint-load-metrics"


def load_report(http: HttpRequest, engines: Iterable[EngineState]) -> list[tuple[bytes, bytes]]:
    """The header with the load of ``engines``, as of their latest steps: queues are added up, the use of KV
    caches is the mean. Empty unless the request asks for it in a known format."""
    format = (http.header(FORMAT_HEADER) or "").lower()
    if format not in ("text", "json"):
        return []
    up = [engine for engine in engines if engine.up]
    kv_usage = sum(engine.kv_used for engine in up) / max(1, len(up))
    metrics = {"kv_cache_usage_perc": kv_usage, "num_requests_waiting": float(sum(e.waiting for e in up))}
    if format == "json":
        return [(REPORT_HEADER, b"JSON " + encode_json({"named_metrics": metrics}))]
    text = ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
    return [(REPORT_HEADER, b"TEXT " + text.encode())]
