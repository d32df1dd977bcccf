"""Envoy's messages as bytes, written down by hand from the field numbers of Envoy's .proto files."""

from __future__ import annotations

import pytest

from penstock.gateway.extproc.messages import (
    BodyMode,
    CommonResponse,
    ImmediateResponse,
    MessagePart,
    ProcessingRequest,
)
from penstock.gateway.extproc.protobuf import message, read_log, read_request, write_response


def field(number: int, content: bytes) -> bytes:
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


@pytest.mark.parametrize("value_number", [2, 3])
def test_request_headers(value_number: int) -> None:
    header = field(1, b":path") + field(value_number, b"/v1")
    config = field(11, b"\x08\x02\x10\x04")
    data = field(2, field(1, field(1, header)) + b"\x18\x01") + config + b"\x50\x01"
    assert read_request(data) == ProcessingRequest(
        MessagePart.REQUEST_HEADERS,
        [(b":path", b"/v1")],
        end=True,
        observing=True,
        request_mode=BodyMode.BUFFERED,
        response_mode=BodyMode.FULL_DUPLEX_STREAMED,
    )


def test_metadata_as_list_and_as_text() -> None:
    request = message("envoy.service.ext_proc.v3.ProcessingRequest")()
    request.response_trailers.SetInParent()
    request.metadata_context.filter_metadata["a"].update(
        {"list": ["x:1", "y:2"], "text": "x:1, y:2", "no": 1}
    )
    told = read_request(request.SerializeToString())
    assert told is not None
    assert told.metadata == {"a": {"list": ["x:1", "y:2"], "text": ["x:1", "y:2"]}}


def test_a_message_of_the_future_is_passed_over() -> None:
    assert read_request(field(15, b"")) is None


def test_a_body_that_is_emptied_is_not_one_that_is_kept() -> None:
    assert write_response(CommonResponse(MessagePart.REQUEST_BODY)) == field(3, b"")
    assert write_response(CommonResponse(MessagePart.REQUEST_BODY, body=b"")) == field(
        3, field(1, field(3, field(1, b"")))
    )


def test_a_chunk() -> None:
    streamed = field(1, b"ab") + b"\x10\x01"
    response = write_response(CommonResponse(MessagePart.RESPONSE_BODY, chunk=b"ab", end=True))
    assert response == field(4, field(1, field(3, field(3, streamed))))


def test_trailers_and_immediate_responses() -> None:
    assert write_response(CommonResponse(MessagePart.REQUEST_TRAILERS)) == field(5, b"")
    option = field(1, field(1, b"a") + field(3, b"b")) + b"\x18\x02"
    content = field(1, b"\x08\xad\x03") + field(2, field(1, option)) + field(3, b"{}") + field(5, b"why")
    assert write_response(ImmediateResponse(429, [(b"a", b"b")], b"{}", "why")) == field(7, content)


def test_log_entries() -> None:
    address = field(1, field(2, b"::1") + b"\x18\x50")
    flags = b"\x28\x01"
    duration = field(9, b"\x08\x01\x10\x80\xca\xb5\xee\x01")
    common = duration + field(13, address) + b"\x82\x01" + bytes([len(flags)]) + flags
    request = field(5, b"/v1") + field(9, b"id")
    response = field(1, b"\x08\xc8\x01")
    entry = field(1, common) + field(3, request) + field(4, response)
    (read,) = read_log(field(2, field(1, entry)))
    assert (read.request_id, read.path, read.status) == ("id", "/v1", 200)
    assert read.upstream == "[::1]:80"
    assert read.flags == {"upstream_remote_reset"}
    assert read.first_byte_s == 1.5


def test_entries_of_running_requests_are_left_out() -> None:
    common = b"\xd0\x01\x01"
    assert read_log(field(2, field(1, field(1, common)))) == []
