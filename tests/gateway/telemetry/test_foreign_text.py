"""What comes from outside is bounded where it is kept, and of what is said nothing is written."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from penstock.gateway.requests.request_body import read_request
from penstock.gateway.responses.expected_reply import ExpectedReply, make_observer
from penstock.gateway.responses.held_bytes import HeldBytes
from penstock.gateway.responses.outcome import Outcome, TransportResult, classify_outcome
from penstock.gateway.responses.request_record import FailedAttempt, RequestRecord, failure_reason
from penstock.gateway.responses.response_observer import MAX_ERROR_BYTES, ReplyObserver, StreamObserver
from penstock.gateway.telemetry.metrics import GatewayMetrics
from penstock.gateway.telemetry.request_recorder import RequestRecorder
from penstock.gateway.telemetry.spans import span_data
from tests.gateway.telemetry.test_request_recorder import lines

SECRET = "my password is hunter2"
ERROR = f'{{"error":{{"message":"{SECRET}","type":"server_error","code":500,"param":"{SECRET}"}}}}'
PATH = "/v1/chat/completions"


def stream(*data: str) -> StreamObserver:
    observer = StreamObserver()
    observer.feed("".join(f"data: {each}\n\n" for each in data).encode(), 0.0)
    observer.finish(0.0)
    return observer


def reply(body: str) -> ReplyObserver:
    observer = ReplyObserver()
    observer.feed(body.encode(), 0.0)
    observer.finish(0.0)
    return observer


def error_of(status: int, body: str, expects: ExpectedReply = "json") -> ReplyObserver:
    headers = [(b"content-type", b"application/json")]
    observer = make_observer(
        status, headers, expects, on_response=lambda id: None, strip_usage=False, held=HeldBytes()
    )
    assert isinstance(observer, ReplyObserver)
    for piece in (body[:20], body[20:]):
        assert observer.feed(piece.encode(), 0.0) == piece.encode()
    observer.finish(0.0)
    return observer


TOO_LONG = f'{{"error":{{"type":"t","message":"{SECRET}{"x" * MAX_ERROR_BYTES}"}}}}'
ERRORS = {
    "of OpenAI": (404, '{"error":{"message":"m","type":"t","code":"model_not_found"}}', "t model_not_found"),
    "of vLLM": (400, ERROR, "server_error 500"),
    "of SGLang": (
        400,
        f'{{"object":"error","message":"{SECRET}","type":"BadRequest","code":400}}',
        "BadRequest 400",
    ),
    "of TGI": (422, f'{{"error":"{SECRET}","error_type":"validation"}}', "validation"),
    "of Anthropic": (529, '{"type":"error","error":{"type":"overloaded_error"}}', "overloaded_error"),
    "of llama.cpp": (500, f'{{"error":{{"code":500,"message":"{SECRET}","type":"t"}}}}', "t 500"),
    "of a proxy": (502, f"<html>{SECRET}", ""),
    "without a body": (500, "", ""),
    "that is long": (500, TOO_LONG, ""),
}


@pytest.mark.parametrize("expects", ["json", "stream", "anything"])
@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_any_status_and_route_have_type_and_code(name: str, expects: ExpectedReply) -> None:
    status, body, said = ERRORS[name]
    seen = error_of(status, body, expects).seen
    assert (seen.content_problem, seen.ended) == (None, True)
    record = RequestRecord(PATH, seen=seen)
    record.outcome = classify_outcome(TransportResult.COMPLETE, status, seen, PATH)
    assert record.outcome is (Outcome.CLIENT_ERROR if status < 500 else Outcome.MODEL_SERVER_ERROR)
    assert failure_reason(record) == f"the model server sent an error {said}".rstrip()


WRONG = {
    "an error status": (error_of(400, ERROR), "the model server sent an error server_error 500"),
    "an error event": (stream(ERROR), "the model server sent an error server_error 500"),
    "an error reply": (reply(ERROR), "the model server sent an error server_error 500"),
    "an error that is text": (stream(f'{{"error":"{SECRET}"}}'), "the model server sent an error"),
    "names that are texts": (
        stream(f'{{"error":{{"type":"{SECRET}","code":"{SECRET}"}}}}'),
        "the model server sent an error",
    ),
    "a failed response": (
        stream(
            f'{{"type":"response.failed","response":{{"error":{{"code":"x_y","message":"{SECRET}"}}}}}}',
        ),
        "the model server sent an error x_y",
    ),
    "a malformed event": (
        stream(f'{{"choices":[{{"text":"{SECRET}"'),
        "an event is not JSON: Input data was truncated",
    ),
    "a malformed reply": (
        reply(f'{{"choices":[{{"text":"{SECRET}"}}}}'),
        "the reply is not JSON: JSON is malformed: expected ',' or ']' (byte 45)",
    ),
    "no reply": (reply(SECRET), "the reply is not JSON: JSON is malformed: invalid character (byte 0)"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("log_content", [False, True])
def test_nothing_that_is_said_is_written(
    name: str, log_content: bool, caplog: pytest.LogCaptureFixture
) -> None:
    observer, reason = WRONG[name]
    record = RequestRecord(PATH, "r", "POST", seen=observer.seen)
    record.outcome = classify_outcome(TransportResult.COMPLETE, 200, observer.seen, PATH)
    record.reason = failure_reason(record)
    assert record.reason == reason
    metrics = GatewayMetrics(list)
    RequestRecorder(metrics, "errors", log_content=log_content).finish(record)
    [line] = lines(caplog)
    assert (SECRET in line.pop("content", "")) is log_content
    for written in (json.dumps(line), repr(span_data(record)), b"".join(metrics.exposition()).decode()):
        assert "hunter2" not in written


def test_names_are_bounded_and_stay_apart() -> None:
    """A model's name may have a megabyte; a gateway keeps 64 of them for ever, in hundreds of series each."""
    metrics = GatewayMetrics(list)
    for index in range(64):
        name = "m" * 20_000 + str(index)
        record = RequestRecord(PATH, "r", "POST", outcome=Outcome.OK, status=200)
        record.set_body(read_request(json.dumps({"model": name}).encode()))
        metrics.request_started(record)
        metrics.request_ended(record)
        assert len(record.model) == len(record.target_model) == 256
    page = b"".join(metrics.exposition()).decode()
    assert len(page) < 20_000_000
    assert len(re.findall(r'^penstock_gateway_request_total{.*,model="mmm', page, re.M)) == 64


def test_what_a_request_says_of_itself_is_bounded_in_the_log_and_in_spans(
    caplog: pytest.LogCaptureFixture,
) -> None:
    long = "x" * 50_000
    failure = FailedAttempt(0.0, "http://a:1", Outcome.NETWORK_ERROR, long)
    record = RequestRecord("/v1/" + long, long, long, reason=long, endpoint=long, failures=[failure])
    RequestRecorder(GatewayMetrics(list), "all").finish(record)
    [line] = lines(caplog)
    assert len(json.dumps(line)) < 3000
    assert len(repr(span_data(record))) < 4000


def test_a_server_that_makes_statuses_up_makes_no_series() -> None:
    metrics = GatewayMetrics(list)
    for status in range(100, 1000):
        metrics.request_ended(RequestRecord(PATH, outcome=Outcome.MODEL_SERVER_ERROR, status=status))
    page = b"".join(metrics.exposition()).decode()
    assert page.count("penstock_gateway_request_total{") < 80
    assert 'status="503"' in page
    assert 'status="999"' not in page


@pytest.mark.parametrize("count", [1e300, 10**40, -1, float("nan"), True, "9", None, [], {}])
def test_a_count_that_is_none_is_not_added(count: Any) -> None:
    usage = json.dumps({"choices": [], "usage": {"prompt_tokens": count, "completion_tokens": 2.0}})
    record = RequestRecord(PATH, seen=stream(usage).seen, outcome=Outcome.OK, status=200)
    metrics = GatewayMetrics(list)
    metrics.request_ended(record)
    page = b"".join(metrics.exposition()).decode()
    assert 'kind="input"' not in page
    assert page.count('kind="output"') == 1
