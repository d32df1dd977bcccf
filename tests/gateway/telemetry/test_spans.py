"""Spans: what they say, that a gateway sends them to a collector, and that no collector is waited for."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.distribution import pip_install
from penstock.gateway.responses.outcome import Outcome
from penstock.gateway.responses.request_record import FailedAttempt, RequestRecord
from penstock.gateway.responses.response_observer import Observation
from penstock.gateway.responses.token_usage import ReportedUsage
from penstock.gateway.telemetry.spans import span_data
from penstock.logging_setup import RateLimitedLog
from penstock.telemetry import spans as spans_module
from penstock.telemetry.gen_ai_metrics import TOKEN_USAGE
from penstock.telemetry.spans import BATCH, BatchSpanExporter, make_span_exporter
from penstock.telemetry.trace_context import TraceContext
from tests.gateway.behaviours import good
from tests.gateway.processes import WAIT_S, Upstream, closed_port, eventually, gateway
from tests.telemetry.collector import Collector, attributes_of, otel

CLIENT = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "v=1", "baggage": "user=a"}


def record(**fields: Any) -> RequestRecord:
    values = {"request_id": "r", "method": "POST", "model": "m", "target_model": "t", "ended_at": 3.0}
    return RequestRecord("/v1/chat/completions", **{"outcome": Outcome.OK, "status": 200, **values, **fields})


def test_what_a_span_says() -> None:
    seen = Observation(first_token_at=1.5, last_token_at=2.0, usage=ReportedUsage(7, 3, 4))
    told = span_data(
        record(seen=seen, began_at=1.0, streamed=True, endpoint="http://10.0.0.1:8000", attempts=2)
    )
    assert told.name == "chat m"
    assert told.error is None
    assert told.events == [("first_token", 1.5, {})]
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "t",
        "gen_ai.request.stream": True,
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.response.time_to_first_chunk": 0.5,
        "http.response.status_code": 200,
        "server.address": "10.0.0.1",
        "server.port": 8000,
        "penstock.outcome": "ok",
        "penstock.request_id": "r",
        "penstock.attempts": 2,
    }
    assert expected.items() <= told.attributes.items()
    assert "error.type" not in told.attributes


def test_what_the_span_of_a_failure_says() -> None:
    failures = [FailedAttempt(1.0, "http://a", Outcome.NETWORK_ERROR, "refused")]
    told = span_data(record(outcome=Outcome.REJECTED, status=503, reason="none_ready", failures=failures))
    assert told.error == "none_ready"
    assert told.attributes["error.type"] == "rejected"
    retry = {"endpoint": "http://a", "error.type": "network_error", "reason": "refused"}
    assert told.events == [("retry", 1.0, retry)]


def test_the_span_of_a_request_without_a_model() -> None:
    assert span_data(record(model="")).name == "chat"


def test_the_span_of_another_request() -> None:
    told = span_data(RequestRecord("/v1/models", method="GET", outcome=Outcome.OK))
    assert told.name == "GET"
    assert not any(key.startswith("gen_ai") for key in told.attributes)


@pytest.mark.parametrize(
    ("path", "operation", "provider"),
    [
        ("/v1/completions", "text_completion", "openai"),
        ("/v1/messages", "chat", "anthropic"),
        ("/v2/embed", "embeddings", "cohere"),
    ],
)
def test_operations(path: str, operation: str, provider: str) -> None:
    attributes = span_data(RequestRecord(path)).attributes
    assert (attributes["gen_ai.operation.name"], attributes["gen_ai.provider.name"]) == (operation, provider)


# -- sending


class Stuck:
    """An exporter that waits until it is told, and then fails or raises."""

    def __init__(self) -> None:
        self.called, self.going_on = threading.Event(), threading.Event()
        self.problem: Exception | None = None

    def export(self, spans: Any) -> Any:
        from opentelemetry.sdk.trace.export import SpanExportResult

        self.called.set()
        assert self.going_on.wait(WAIT_S)
        if self.problem is not None:
            raise self.problem
        return SpanExportResult.FAILURE

    def shutdown(self) -> None: ...


def sampled(*, keep: bool = True) -> RequestRecord:
    return record(trace=TraceContext(1, None, 2, keep))


@otel
def test_what_there_is_no_room_for_is_dropped_and_counted() -> None:
    exporter = Stuck()
    spans = BatchSpanExporter(exporter, list, most_waiting=40)  # type: ignore[arg-type]
    for _ in range(32):
        spans.add(sampled())
    assert exporter.called.wait(WAIT_S)  # with those 32; nobody waits for it
    for _ in range(50):
        spans.add(sampled())
    for _ in range(50):
        spans.add(sampled(keep=False))
        spans.add(record())
    assert spans.counts["dropped"] == 10
    exporter.going_on.set()
    spans.close()
    assert spans.counts == {"exported": 0, "failed": 72, "dropped": 10}


@otel
def test_an_exporter_that_raises_does_not_end_the_thread() -> None:
    exporter = Stuck()
    exporter.problem = RuntimeError("no")
    exporter.going_on.set()
    spans = BatchSpanExporter(exporter, list)  # type: ignore[arg-type]
    for number in (1, 2):
        spans.add(sampled())
        eventually(lambda number=number: spans.counts["failed"] == number)
    spans.close()


@otel
def test_a_collector_that_refuses_every_batch_is_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans_module, "_warn", RateLimitedLog(logging.getLogger("penstock.telemetry")))
    with Collector(status=400) as refusing:
        spans = make_span_exporter(refusing.url, span_data, service="edge", scope="test", instance="1")
        for _ in range(5 * BATCH):
            spans.add(sampled())
        eventually(lambda: spans.counts["failed"] == 5 * BATCH)
        spans.close()
    assert len(caplog.messages) == 1
    assert "400" in caplog.text


# -- a gateway and a collector


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@otel
def test_spans_reach_a_collector(collector: Collector) -> None:
    options = ("--otlp-endpoint", collector.url, "--model-rewrite", "m=small")
    with Upstream(good) as server, gateway(server, options=options) as front:
        began = time.time_ns()
        reply = front.client.post(
            "/v1/completions",
            json={"model": "m", "prompt": "p", "stream": True},
            headers={**CLIENT, "x-request-id": "mine"},
        )
        assert reply.status_code == 200
        span = collector.span_of("mine")
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == ("a" * 32, "b" * 16)
        sent = server.calls[-1].headers
        assert sent["traceparent"] == f"00-{'a' * 32}-{span.span_id.hex()}-01"
        assert (sent["tracestate"], sent["baggage"]) == ("v=1", "user=a")
        assert (span.name, span.kind) == ("text_completion m", span.SPAN_KIND_SERVER)
        assert [event.name for event in span.events] == ["first_token"]
        assert abs(span.start_time_unix_nano - began) < WAIT_S * 1e9, "in Unix time"
        assert span.start_time_unix_nano <= span.events[0].time_unix_nano <= span.end_time_unix_nano
        told = attributes_of(span)
        assert told["gen_ai.usage.output_tokens"] == 2
        assert told["gen_ai.response.model"] == "small"
        assert f"http://{told['server.address']}:{told['server.port']}" == server.url
        eventually(lambda: front.counts("spans_total") == {"exported": 1, "failed": 0, "dropped": 0})
        assert front.client.get("/v1/models", headers={"traceparent": CLIENT["traceparent"][:-1] + "0"})
        assert front.complete().status_code == 200
        eventually(lambda: front.counts("spans_total")["exported"] == 2)
        assert len(collector.spans) == 2, "the one that was not to be kept was not sent"
        eventually(lambda: f'"trace_id": "{"a" * 32}"' in "".join(front.lines))
    assert collector.services == {"penstock-gateway"}
    assert set(collector.paths) == {"/v1/traces", "/v1/metrics"}
    [(told, took)] = collector.points("gen_ai.server.request.duration")  # sent when it ended
    assert told == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "small",
    }
    assert (took.count, sum(took.bucket_counts)) == (2, 2)
    assert 0 < took.sum < WAIT_S
    assert began < took.start_time_unix_nano + WAIT_S * 1e9
    assert took.start_time_unix_nano < took.time_unix_nano
    assert collector.count("gen_ai.server.time_to_first_token") == 2
    usage = [(point.sum, told["gen_ai.token.type"]) for told, point in collector.points(TOKEN_USAGE.name)]
    assert sorted(usage) == [(4, "output"), (6, "input")]


@otel
def test_a_retry_is_an_event(collector: Collector) -> None:
    options = ("--otlp-endpoint", f"{collector.url}/mine", "--otlp-service-name", "edge")
    dead = closed_port()
    with Upstream(good) as server, gateway(dead, server, options=options) as front:
        while not front.counts("retry_total")[""]:
            reply = front.complete()
            assert reply.status_code == 200
        span = collector.span_of(reply.headers["x-request-id"])
        assert [event.name for event in span.events] == ["retry", "first_token"]
        assert attributes_of(span.events[0])["endpoint"] == dead
        assert not span.parent_span_id
    assert collector.services == {"edge"}
    assert set(collector.paths) == {"/mine"}


@otel
def test_no_collector_is_waited_for() -> None:
    options = ("--otlp-endpoint", closed_port())
    with Upstream(good) as server, gateway(server, options=options) as front:
        for _ in range(5):
            assert front.complete().status_code == 200
        front.process.terminate()
        assert front.process.wait(WAIT_S) == 0


def test_without_the_libraries_the_error_names_the_extra() -> None:
    arguments = ["gateway", "--port", "0", "--otlp-endpoint", "http://c:4318", "--endpoints", "http://s"]
    code = (
        "import sys; sys.modules['opentelemetry'] = None; from penstock.cli.main import main;"
        f"sys.exit(main({json.dumps(arguments)}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode != 0
    assert pip_install("otel") in done.stderr
