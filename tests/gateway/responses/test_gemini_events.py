"""What the gateway reads in Gemini's replies."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from penstock.gateway.responses.event_reader import read_reply
from penstock.gateway.responses.outcome import Outcome, TransportResult, classify_outcome
from penstock.gateway.responses.response_observer import StreamObserver
from penstock.gateway.responses.token_usage import ReportedUsage, read_usage

USAGE = {
    "promptTokenCount": 9,
    "candidatesTokenCount": 4,
    "thoughtsTokenCount": 2,
    "cachedContentTokenCount": 8,
    "totalTokenCount": 15,
}
COUNTED = ReportedUsage(9, 6, 8, 2)


def chunk(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    content = {"content": {"role": "model", "parts": list(parts)}, "index": 0}
    return {"candidates": [content | fields.pop("candidate", {})], "modelVersion": "m", **fields}


def event(*parts: dict[str, Any], **fields: Any) -> bytes:
    return b"data: " + msgspec.json.encode(chunk(*parts, **fields)) + b"\n\n"


END = event({"text": ""}, candidate={"finishReason": "STOP"}, usageMetadata=USAGE)
STREAM = event({"text": "a"}) + event({"text": "b"}) + event({"functionCall": {"name": "f"}}) + END


def test_a_stream_however_it_is_cut() -> None:
    for at in range(len(STREAM) + 1):
        observer = StreamObserver()
        assert observer.feed(STREAM[:at], 0.0) + observer.feed(STREAM[at:], 1.0) == STREAM
        observer.finish(2.0)
        seen = observer.seen
        assert (seen.token_events, seen.usage, seen.error) == (3, COUNTED, None)
        assert classify_outcome(TransportResult.COMPLETE, 200, seen, "/v1beta/models") is Outcome.OK


@pytest.mark.parametrize("end", [b"\n\n", b"\n", b""])
@pytest.mark.parametrize("indent", [0, 2])
def test_a_stream_whose_server_fails(end: bytes, indent: int) -> None:
    said = json.dumps({"error": {"code": 500, "message": "m", "status": "INTERNAL"}}, indent=indent or None)
    failed = event({"text": "a"}) + said.encode() + end
    for at in range(len(failed) + 1):
        observer = StreamObserver()
        assert observer.feed(failed[:at], 0.0) + observer.feed(failed[at:], 0.0) == failed
        observer.finish(1.0)
        outcome = classify_outcome(TransportResult.COMPLETE, 200, observer.seen, "/v1beta/models")
        assert (outcome, observer.seen.error) == (Outcome.MODEL_SERVER_ERROR, "500")


def test_a_stream_that_breaks_off_is_not_complete() -> None:
    observer = StreamObserver()
    observer.feed(event({"text": "a"}) + b'{"no": "error"}\n\n', 0.0)
    observer.finish(1.0)
    outcome = classify_outcome(TransportResult.COMPLETE, 200, observer.seen, "/v1beta/models")
    assert outcome is Outcome.NETWORK_ERROR


def test_whole_replies_and_arrays() -> None:
    whole = msgspec.json.encode(chunk({"text": "a"}, usageMetadata=USAGE))
    array = b"[%b,\n%b]" % (msgspec.json.encode(chunk({"text": "a"})), whole)
    for body in (whole, array):
        usage = read_reply(body).usage
        assert usage is not None
        assert read_usage(usage) == COUNTED
    assert read_reply(b'[{"error": {"code": 503}}]').error == b'{"code": 503}'
