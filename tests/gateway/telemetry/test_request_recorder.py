"""The access log: one JSON object for each request that is wanted, with all that is known about it."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import pytest

import penstock
from penstock.gateway.responses.outcome import Outcome
from penstock.gateway.responses.request_record import FailedAttempt, RequestRecord
from penstock.gateway.responses.response_observer import Observation
from penstock.gateway.responses.token_usage import ReportedUsage
from penstock.gateway.telemetry.metrics import GatewayMetrics
from penstock.gateway.telemetry.request_recorder import RequestRecorder
from penstock.gateway.telemetry.spans import span_data
from penstock.telemetry.trace_context import TraceContext
from tests.gateway.behaviours import good
from tests.gateway.processes import Upstream, closed_port, eventually, gateway


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [
        json.loads(each.getMessage()) for each in caplog.records if each.name == "penstock.gateway.access"
    ]


def test_all_facts(caplog: pytest.LogCaptureFixture) -> None:
    record = RequestRecord(
        "/v1/completions", "r", "POST", TraceContext(0xA, None), model="chat", target_model="small"
    )
    record.priority, record.streamed, record.endpoint, record.status = -1, True, "http://a:1", 200
    record.began_at, record.ended_at, record.attempts = 1.0, 3.5, 2
    record.outcome, record.reason = Outcome.NETWORK_ERROR, "reset"
    record.bytes_in, record.bytes_out = 10, 20
    record.failures.append(FailedAttempt(1.5, "http://b:1", Outcome.MODEL_SERVER_ERROR, "status 503"))
    record.seen = Observation(first_token_at=1.25, token_events=4, usage=ReportedUsage(7, 5, 3))
    RequestRecorder(GatewayMetrics(list), "all").finish(record)
    [line] = lines(caplog)
    assert datetime.fromisoformat(line.pop("time")).tzinfo is not None
    assert line == {
        "request_id": "r",
        "trace_id": "0" * 31 + "a",
        "method": "POST",
        "path": "/v1/completions",
        "model": "chat",
        "target_model": "small",
        "streamed": True,
        "priority": -1,
        "outcome": "network_error",
        "reason": "reset",
        "status": 200,
        "endpoint": "http://a:1",
        "attempts": 2,
        "failures": [{"endpoint": "http://b:1", "outcome": "model_server_error", "reason": "status 503"}],
        "seconds": 2.5,
        "ttft": 0.25,
        "input_tokens": 7,
        "output_tokens": 5,
        "cached_tokens": 3,
        "token_events": 4,
        "bytes_in": 10,
        "bytes_out": 20,
    }
    page = (Path(penstock.__file__).parents[1] / "docs" / "gateway.md").read_text()
    assert not [fact for fact in line if f"`{fact}`" not in page]


def test_the_output_of_a_broken_stream_is_what_came(caplog: pytest.LogCaptureFixture) -> None:
    """Messages start with an output of one token."""
    seen = Observation(stream=True, token_events=4, usage=ReportedUsage(7, 1, 3))
    record = RequestRecord("/v1/messages", "r", "POST", seen=seen, outcome=Outcome.CLIENT_DISCONNECT)
    RequestRecorder(GatewayMetrics(list), "all").finish(record)
    [line] = lines(caplog)
    assert (line["input_tokens"], line.get("output_tokens"), line["token_events"]) == (7, None, 4)
    assert "gen_ai.usage.output_tokens" not in span_data(record).attributes


@pytest.mark.parametrize(
    ("wanted", "outcomes"),
    [("none", []), ("errors", ["rejected"]), ("all", ["ok", "ok_without_usage", "rejected"])],
)
def test_what_is_wanted(
    wanted: Literal["none", "errors", "all"], outcomes: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    recorder = RequestRecorder(GatewayMetrics(list), wanted)
    for outcome in (Outcome.OK, Outcome.OK_WITHOUT_USAGE, Outcome.REJECTED):
        recorder.finish(RequestRecord("/v1/completions", outcome=outcome))
    assert [line["outcome"] for line in lines(caplog)] == outcomes


def test_a_file_of_nothing_but_json(tmp_path: Path) -> None:
    """Whatever the log level is; and opened anew when it was moved away, as log rotation does."""
    log, moved = tmp_path / "access.jsonl", tmp_path / "access.jsonl.1"
    options = ("--access-log-file", str(log), "--log-level", "error")
    dead = closed_port()
    with Upstream(good) as server, gateway(dead, server, options=options) as front:
        while not front.counts("retry_total")[""]:
            front.complete()
        eventually(lambda: log.read_text().count("\n") == front.counts().get("ok", 0))
        retried = json.loads(log.read_text().splitlines()[-1])
        assert (retried["endpoint"], retried["attempts"]) == (server.url, 2)
        assert [failure["endpoint"] for failure in retried["failures"]] == [dead]
        assert {"ttft", "input_tokens", "output_tokens", "bytes_in", "bytes_out"} <= retried.keys()
        log.rename(moved)
        front.client.post("/v1/completions", content=b"{")
        eventually(lambda: log.exists() and log.read_text().endswith("\n"))
        assert json.loads(log.read_text())["reason"] == "bad_body"
        assert not any('"outcome"' in line for line in front.lines)


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match=r"--access-log-file .*: No such file or directory"),
        gateway("http://127.0.0.1:1", options=("--access-log-file", str(tmp_path / "no" / "such"))),
    ):
        pass


def test_a_pool_that_stood_in_is_named(caplog: pytest.LogCaptureFixture) -> None:
    record = RequestRecord("/v1/completions", endpoint="http://a:1", pool="spare", fell_back=True)
    RequestRecorder(GatewayMetrics(list), "all").finish(record)
    [line] = lines(caplog)
    assert (line["pool"], line["fallback"]) == ("spare", True)
