"""Log lines in JSON and spans, from every process of a server; the collector is a real one over loopback."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock.telemetry.gen_ai_metrics import TIME_PER_OUTPUT_TOKEN
from tests.integration.server import SYNTHETIC, Server, total, wait_until
from tests.telemetry.collector import Collector, attributes_of, otel

TRACE, PARENT = "a" * 32, "b" * 16
CLIENT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
SECRET = "tell nobody what this prompt says"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def server(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--api-server-count", "2", "--data-parallel-size", "2", "--api-key", "swordfish")
    logs = ("--log-format", "json", "--access-log", "all", "--log-interval", "0")
    spans = (
        "--otlp-endpoint",
        collector.url,
        "--otlp-service-name",
        "mine",
        "--otlp-metrics-interval",
        "0.25",
    )
    directory = tmp_path_factory.mktemp("telemetry")
    with Server(*SYNTHETIC, *options, *logs, *spans, directory=directory) as running:
        yield running


def ask(server: Server, request_id: str, expected: int = 200, **body: Any) -> Any:
    headers = {"authorization": "Bearer swordfish", "x-request-id": request_id, **CLIENT}
    reply = server.post("/v1/completions", {"prompt": SECRET, **body}, **headers)
    assert reply.status_code == expected, reply.text
    return reply


def up(server: Server) -> float:
    return total(server.metrics(authorization="Bearer swordfish"), "penstock:engine_up")


def running(server: Server) -> list[float]:
    text = server.metrics(authorization="Bearer swordfish")
    return [total(text, "vllm:num_requests_running", engine=str(rank)) for rank in (0, 1)]


def parts_of(collector: Collector, span: Any, count: int) -> list[Any]:
    """The spans of engines that have ``span`` as their parent."""

    def found() -> list[Any]:
        return [each for each in collector.spans if each.parent_span_id == span.span_id]

    wait_until(lambda: len(found()) >= count, 90, "the engines' spans")
    assert len(found()) == count
    return found()


@otel
def test_a_request_has_a_span_and_one_in_the_engine_for_each_choice(
    server: Server, collector: Collector
) -> None:
    began = time.time_ns()
    ask(server, "first", max_tokens=5, n=2)
    span = collector.span_of("first")
    told = attributes_of(span)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert (span.name, span.kind, span.trace_state) == (
        "text_completion m",
        span.SPAN_KIND_SERVER,
        "vendor=1",
    )
    assert [event.name for event in span.events] == ["first_token"]
    assert abs(span.start_time_unix_nano - began) < 10e9, "in Unix time"
    expected = {
        "gen_ai.request.model": "m",
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.request.choice.count": 2,
        "http.response.status_code": 200,
        "penstock.outcome": "length",
    }
    assert expected.items() <= told.items()
    assert told["gen_ai.response.time_to_first_chunk"] > 0
    assert [each.string_value for each in told["gen_ai.response.finish_reasons"].values] == ["length"] * 2
    for part in parts_of(collector, span, 2):
        told = attributes_of(part)
        assert (part.name, part.trace_id.hex(), part.trace_state) == ("llm_request", TRACE, "vendor=1")
        assert told["gen_ai.usage.completion_tokens"] == 5
        assert told["gen_ai.usage.prompt_tokens"] > 0
        assert told["gen_ai.latency.time_in_queue"] >= 0
        assert told["gen_ai.latency.e2e"] >= told["gen_ai.latency.time_to_first_token"] > 0
        assert told["penstock.engine"] in (0, 1)
        assert span.start_time_unix_nano <= part.start_time_unix_nano <= part.end_time_unix_nano
    assert collector.services == {"mine"}
    assert set(collector.paths) <= {"/v1/traces", "/v1/metrics"}


@otel
def test_streams_and_stop_strings(server: Server, collector: Collector) -> None:
    text = ask(server, "plain", max_tokens=20, seed=1).json()["choices"][0]["text"]
    ask(server, "stopped", max_tokens=20, seed=1, stream=True, stop=[text[4:8]])
    span = collector.span_of("stopped")
    assert attributes_of(span)["gen_ai.request.stream"]
    [part] = parts_of(collector, span, 1)
    [reason] = attributes_of(part)["gen_ai.response.finish_reasons"].values
    assert reason.string_value == "stop"
    assert not part.status.code, "it is no error"


@otel
def test_every_request_is_in_the_metrics_once(server: Server, collector: Collector) -> None:
    """Of two API servers and two engines; what has no operation or no plan is in none."""
    before = collector.count("gen_ai.server.request.duration")
    for n in range(6):
        ask(server, f"metrics-{n}", max_tokens=6, stream=n % 2 == 0)
    ask(server, "none", 400, max_tokens=-1)
    duration = "gen_ai.server.request.duration"
    wait_until(lambda: collector.count(duration) - before >= 6, 90, "the metrics")
    shown = total(server.metrics(authorization="Bearer swordfish"), "penstock:requests_total")
    wait_until(lambda: collector.count(duration) >= shown, 90, "the metrics of all requests")
    assert collector.count(duration) == shown, "counted once"
    assert collector.count("gen_ai.server.time_to_first_token") == shown
    assert collector.count("gen_ai.client.token.usage", gen_ai__token__type="input") == shown
    tokens = total(server.metrics(authorization="Bearer swordfish"), "penstock:tokens_delivered_total")
    points = collector.points("gen_ai.client.token.usage")
    assert sum(p.sum for told, p in points if told["gen_ai.token.type"] == "output") == tokens
    told, point = collector.points("gen_ai.server.time_per_output_token")[0]
    assert told == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m",
    }, "the port is the system's choice"
    assert list(point.explicit_bounds) == list(TIME_PER_OUTPUT_TOKEN.bounds)
    [metric] = {
        (m.unit, m.histogram.aggregation_temporality) for _, m in collector.metrics if m.name == duration
    }
    assert metric == ("s", 2), "cumulative"
    instances = {about["service.instance.id"] for about, _ in collector.metrics}
    assert {each.rpartition("-")[0] for each in instances} <= {"api-server-0-0", "api-server-1-0"}
    assert {about["service.name"] for about, _ in collector.metrics} == {"mine"}


@otel
def test_failures_are_errors_with_their_type(server: Server, collector: Collector) -> None:
    ask(server, "refused", 400, max_tokens=-1)
    span = collector.span_of("refused")
    told = attributes_of(span)
    assert span.status.code == span.status.STATUS_CODE_ERROR
    assert told["http.response.status_code"] == 400
    assert told["error.type"]


@otel
def test_a_trace_that_is_not_sampled_has_no_spans(server: Server, collector: Collector) -> None:
    headers = {"authorization": "Bearer swordfish", "traceparent": f"00-{'c' * 32}-{PARENT}-00"}
    server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, **headers)
    ask(server, "next", max_tokens=1)
    parts_of(collector, collector.span_of("next"), 1)
    assert "c" * 32 not in {span.trace_id.hex() for span in collector.spans}


@otel
def test_neither_prompts_nor_keys_are_told(server: Server, collector: Collector) -> None:
    ask(server, "secret", max_tokens=2)
    ask(server, "wrong", 400, temperature=SECRET)
    collector.span_of("wrong")
    collector.span_of("secret")
    everything = "".join(map(str, collector.spans)) + server.log
    assert SECRET not in everything
    assert "swordfish" not in everything


@otel
def test_a_resumed_stream_says_so_and_every_line_of_every_process_is_one_object(
    server: Server, collector: Collector
) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, server, "resumed", max_tokens=1000, ignore_eos=True, stream=True)
        found: list[float] = []

        def runs() -> bool:
            found[:] = running(server)
            return 1 in found

        wait_until(runs, 90, "its start")
        rank = found.index(1)
        engines = [each for each in server.children("engine") if f"engine {rank}" in " ".join(each.cmdline())]
        engines[0].kill()
        asked.result()
    span = collector.span_of("resumed")
    [resumed] = [event for event in span.events if event.name == "resumed"]
    assert attributes_of(resumed)["penstock.engine"] == 1 - rank
    [part] = parts_of(collector, span, 1)
    assert attributes_of(part)["penstock.resumed_tokens"] == attributes_of(resumed)["penstock.position"]
    wait_until(lambda: up(server) == 2, 90, "the engine's return")
    wait_until(lambda: 'cmpl-resumed"' in server.log, 90, "the line of the request")
    lines = [json.loads(line) for line in server.log.splitlines()]
    for line in lines:
        assert {"time", "level", "process", "logger", "message"} <= set(line), line
        assert set(line) <= {"time", "level", "process", "logger", "message", "exception", "stack", "fields"}
    [ready] = [line["fields"] for line in lines if line["message"] == "ready"]
    assert ready["URL"].startswith(server.url)
    [logged] = [line["fields"] for line in lines if "resumed" in line.get("fields", {}).get("request_id", "")]
    assert logged["output_tokens"] == 1000
    assert {line["process"].split()[0] for line in lines} >= {"supervisor", "api-server"}


@otel
def test_a_collector_that_is_down_delays_nothing(tmp_path: Path) -> None:
    with Server(*SYNTHETIC, "--otlp-endpoint", "http://127.0.0.1:9", directory=tmp_path) as server:
        for _ in range(3):
            server.complete(max_tokens=2)
        server.process.terminate()
        assert server.process.wait(90) == 143 or server.process.returncode == 0


def test_without_the_libraries_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from penstock.config.errors import ConfigError
    from penstock.telemetry import spans

    monkeypatch.setattr(spans, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--otlp-endpoint.*\[otel\]"):
        spans.check_tracing("http://127.0.0.1:4318")
