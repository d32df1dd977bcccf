"""What servers send, as messages and as events."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.gateway.websocket.server_message import as_event, error_message, in_lane, refusal_in, type_of
from penstock.streaming.sse_parser import SSEParser


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (b'{"type":"response.created"}', b"response.created"),
        (b' {"a":{"type":"x"},"type":"error"}', b"error"),
        (b'{"type":"res\\u0070onse.failed"}', b"response.failed"),
        (b'{"type":1}', b""),
        (b"no JSON", b""),
    ],
)
def test_types(message: bytes, kind: bytes) -> None:
    assert type_of(message) == kind


def test_messages_as_events() -> None:
    for message in (b'{"a":1}', b'{\n "a": 1,\n "b": 2}', b'{\r\n "a": 1}'):
        (event,) = SSEParser().feed(as_event(message))
        assert event.data is not None
        assert msgspec.json.decode(event.data) == msgspec.json.decode(message)


def test_lanes() -> None:
    assert in_lane(b' {"a":1}', "l") == b'{"stream_id":"l","a":1}'
    assert in_lane(b'{"stream_id":"l"}', "l") == b'{"stream_id":"l"}'
    assert in_lane(b'{"a":1}', None) == b'{"a":1}'


def test_refusals() -> None:
    error = b'{"type":"error","status":429,"error":{},"headers":{"Retry-After":"3","x-a":"b"}}'
    assert refusal_in(error) == (429, [(b"content-type", b"application/json"), (b"retry-after", b"3")])
    assert refusal_in(b'{"type":"error","status":200}') is None
    assert refusal_in(b'{"type":"error","code":"x"}') is None
    assert refusal_in(b'{"type":"error","status":503,"headers":{"retry-after":"1\\r\\nx: y"}}') == (
        503,
        [(b"content-type", b"application/json")],
    )


@pytest.mark.parametrize(
    ("body", "error", "status"),
    [
        (b'{"error":{"message":"no","code":1}}', {"message": "no", "code": 1}, 503),
        (b'{"type":"error","error":{"code":"a"},"code":"a"}', {"code": "a"}, 503),
        (b'{"error":{"code":"owner_unavailable"}}', {"code": "previous_response_not_found"}, 400),
        (b"<html>", {"type": "server_error", "code": None, "message": "<html>", "param": None}, 503),
        (b'{"detail":"No"}', {"type": "server_error", "code": None, "message": "No", "param": None}, 503),
    ],
)
def test_errors(body: bytes, error: dict[str, Any], status: int) -> None:
    got, message = error_message(body, 503, [(b"retry-after", b"2"), (b"server", b"x")])
    assert got == status
    assert msgspec.json.decode(message) == {
        "type": "error",
        "status": status,
        "error": error,
        "headers": {"retry-after": "2"},
    }


def test_an_error_that_is_one_stays() -> None:
    error = b'{"type": "error", "status": 400, "error": {"code": "x"}}'
    assert error_message(error, 503) == (400, error)
