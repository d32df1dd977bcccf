"""Metrics for a collector: what waits is one set of them, and the end is sent or given up in time."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest

from penstock.config.gateway import GatewayConfig
from penstock.logging_setup import RateLimitedLog
from penstock.metrics.ended_requests import MAX_KINDS, EndedRequests, RequestFigures, RequestKind
from penstock.telemetry import spans
from penstock.telemetry.exports import METRICS_PATH, Exports
from penstock.telemetry.gen_ai_metrics import (
    GEN_AI_HISTOGRAMS,
    REQUEST_DURATION,
    TIME_PER_OUTPUT_TOKEN,
    TIME_TO_FIRST_TOKEN,
    TOKEN_USAGE,
    added_up,
)
from penstock.telemetry.metric_export import MetricExport
from penstock.telemetry.spans import TRACES_PATH, check_tracing, resource_of, signal_url
from tests.telemetry.collector import Collector, otel

CHAT = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai", "gen_ai.request.model": "m"}
CHAT["gen_ai.response.model"] = "m"


class Stuck:
    """An exporter that does not come back before it is shut down."""

    def __init__(self) -> None:
        self.called, self.ended = threading.Event(), threading.Event()
        self.sent: list[Any] = []

    def export(self, data: Any) -> None:
        self.sent.append(data)
        self.called.set()
        self.ended.wait()
        raise RuntimeError("shut down")

    def shutdown(self) -> None:
        self.ended.set()


def ended(*kinds: RequestKind) -> EndedRequests:
    found = EndedRequests()
    for kind in kinds:
        found.add(kind, 0.5)
        found.add_exported(kind, RequestFigures(0.5, 0.1, 7, 5, 3))
    return found


def test_points_of_requests_that_ended() -> None:
    """Failed ones have no latencies, but tokens; two histograms show one column of durations."""
    good, bad, cut = (
        RequestKind("chat", "stop", "m"),
        RequestKind("chat", "error", "m"),
        RequestKind("chat", "length", "m"),
    )
    found = ended(good, bad, cut, RequestKind("rerank", "stop", "m"))
    points = added_up(found.points())
    assert set(points) == set(GEN_AI_HISTOGRAMS)
    durations = {str(each.attributes.get("error.type")): each for each in points[REQUEST_DURATION]}
    assert durations.keys() == {"None", "error"}
    assert (durations["None"].attributes, durations["None"].total) == (CHAT, 1.0)
    assert durations["None"].counts[REQUEST_DURATION.bounds.index(0.64)] == sum(durations["None"].counts) == 2
    [first] = points[TIME_TO_FIRST_TOKEN]
    assert (first.attributes, sum(first.counts), first.total) == (CHAT, 2, pytest.approx(0.2))
    [per_token] = points[TIME_PER_OUTPUT_TOKEN]
    assert (sum(per_token.counts), per_token.total) == (2, pytest.approx(0.4))
    usage = {each.attributes["gen_ai.token.type"]: each.total for each in points[TOKEN_USAGE]}
    assert usage == {"input": 21, "output": 15}
    assert found.durations().total == 2.0


def test_models_beyond_the_limit_share_a_kind() -> None:
    found = ended(*(RequestKind("chat", "stop", f"m{n}") for n in range(2 * MAX_KINDS)))
    assert len(added_up(found.points())[REQUEST_DURATION]) == MAX_KINDS + 1
    assert found.counts() == {("chat", "stop"): 2 * MAX_KINDS}


@pytest.mark.parametrize(
    ("url", "metrics"),
    [
        ("http://c:4318", "http://c:4318/v1/metrics"),
        ("http://c:4318/", "http://c:4318/v1/metrics"),
        ("https://c/otlp/v1/traces", "https://c/otlp/v1/metrics"),
        ("https://c/spans", None),
    ],
)
def test_where_a_collector_takes_metrics(url: str, metrics: str | None) -> None:
    assert signal_url(url, METRICS_PATH) == metrics
    assert signal_url(url, TRACES_PATH) == (url if "/" in url[8:-1] else "http://c:4318/v1/traces")


@otel
def test_only_the_latest_waits_and_a_stuck_collector_ends_in_time(caplog: pytest.LogCaptureFixture) -> None:
    requests, exporter = ended(RequestKind("chat", "stop", "m")), Stuck()
    export = MetricExport(exporter, resource_of("s", "1"), "test", requests.points, 60.0, {})  # type: ignore[arg-type]
    export.finish()
    assert exporter.called.wait(60)
    began = time.monotonic()
    export._close_by = began  # the time is over
    export.close()
    export._thread.join(60)
    assert not export._thread.is_alive()
    assert len(exporter.sent) == 1
    assert "the last metrics were not exported" in caplog.text


@otel
def test_a_collector_that_refuses_is_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "_warn", RateLimitedLog(logging.getLogger("penstock.telemetry")))
    requests = ended(RequestKind("chat", "stop", "m"))
    with Collector(status=400) as collector:
        options = GatewayConfig(
            otlp_endpoint=collector.url, otlp_metrics_interval=0.01, host="0.0.0.0", port=8080
        )
        exports: Exports[Any] = Exports(options, lambda _: None, requests.points, scope="t", instance="1")  # type: ignore[arg-type, return-value]
        of_socket: Exports[Any] = Exports(
            options,
            lambda _: None,  # type: ignore[arg-type, return-value]
            EndedRequests().points,
            scope="t",
            instance="2",
            uds="/run/s",
        )
        assert of_socket.metrics is not None
        assert of_socket.metrics._common == {"server.address": "/run/s"}
        of_socket.finish()
        of_socket.close()
        exports.finish()
        requests.add(RequestKind("chat", "abort", "m"), 0.1)
        exports.close()
        [(told, point)] = collector.points("gen_ai.server.request.duration")
    assert (told["server.port"], point.count) == (8080, 1)
    assert told["server.address"] not in ("0.0.0.0", "")
    assert not point.HasField("min")
    assert sum("400" in line for line in caplog.messages) == 1


@otel
def test_metrics_are_off_with_interval_0() -> None:
    check_tracing("http://127.0.0.1:9")
    options = GatewayConfig(otlp_endpoint="http://127.0.0.1:9", otlp_metrics_interval=0.0)
    exports: Exports[Any] = Exports(options, lambda _: None, list, scope="t", instance="1")  # type: ignore[arg-type, return-value]
    assert exports.metrics is None
    assert exports.running() == []
    exports.close()


@otel
@pytest.mark.parametrize("status", [200, 400])
def test_of_a_long_answer_the_beginning_is_read(status: int) -> None:
    """A collector that answers with 1 GB would take the memory of an API server."""
    from penstock.telemetry.collector_session import MAX_ANSWER_BYTES, collector_session

    session = collector_session()
    assert session is not None
    with session, Collector(status, b"x" * (40 * MAX_ANSWER_BYTES)) as collector:
        for _ in range(2):
            answered = session.post(collector.url + METRICS_PATH, data=b"", timeout=10)
            assert (answered.status_code, len(answered.text)) == (status, MAX_ANSWER_BYTES)
