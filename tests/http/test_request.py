"""Reading a request's headers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from penstock.http.errors import ApiError
from penstock.http.http1.request_head import MAX_KNOWN_BYTES, MAX_KNOWN_LINES, _known_lines, parse_head
from penstock.http.request import beyond_option
from tests.http.requests import http_request

Headers = list[tuple[bytes, bytes]]


def test_the_first_of_several_headers_counts_until_they_are_forgotten() -> None:
    request = http_request(headers=[(b"a", b"1"), (b"b", b"\xe9"), (b"a", b"2")])
    assert request.fields == {b"a": b"1", b"b": b"\xe9"}
    assert (request.header(b"a"), request.header(b"b")) == ("1", "é")
    assert request.header(b"c") is None
    request.forget_headers()
    assert request.header(b"a") is None
    assert request.headers == []


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ([(b"content-encoding", b"gzip")], "Content-Encoding"),
        ([(b"content-encoding", b"identity"), (b"content-encoding", b"gzip")], "Content-Encoding"),
        ([(b"content-type", b"text/plain"), (b"content-encoding", b"br")], "Content-Encoding"),
        ([(b"content-type", b"application/json; charset=utf-8"), (b"content-encoding", b"Identity")], None),
        ([(b"content-type", b"application/x+json")], None),
        ([], None),
    ],
)
def test_every_header_of_the_body_is_checked(headers: Headers, param: str | None) -> None:
    async def read() -> bytes:
        return await http_request("POST", headers=headers, body=b"{}").read_json(10)

    if param is None:
        assert asyncio.run(read()) == b"{}"
        return
    with pytest.raises(ApiError) as caught:
        asyncio.run(read())
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("more", "end"), [((), "11 bytes that this route takes."), ((beyond_option,), "by --max-request-bytes.")]
)
def test_a_body_that_is_too_large_names_what_limits_it(
    more: tuple[Callable[[int], ApiError], ...], end: str
) -> None:
    request = http_request("POST", headers=[(b"content-length", b"12")], body=b"[1, 2, 3, 4]")
    with pytest.raises(ApiError) as caught:
        asyncio.run(request.read_json(11, *more))
    assert caught.value.status == 413
    assert caught.value.message.endswith(end)


def test_a_second_content_type_is_refused_with_the_head() -> None:
    lines = b"Host: x\r\nContent-Type: application/json\r\nContent-Type: text/plain\r\n\r\n"
    with pytest.raises(ApiError) as caught:
        parse_head(b"POST /x HTTP/1.1\r\n" + lines)
    assert caught.value.param == "content-type"


def test_header_lines_are_remembered_within_bounds() -> None:
    _known_lines.clear()
    long = b"x-long: " + b"x" * MAX_KNOWN_BYTES
    for number in range(3 * MAX_KNOWN_LINES):
        line = b"X-Number: %d" % number
        head = parse_head(b"GET / HTTP/1.1\r\nHost: x\r\n%b\r\n%b\r\n\r\n" % (line, long))
        assert head.headers[1:] == [(b"x-number", b"%d" % number), (b"x-long", long[8:])]
        assert len(_known_lines) <= MAX_KNOWN_LINES
    assert long not in _known_lines
    for malformed in (b"X-Number 1", b": 1", b"x y: 1", b"x: 1\n", b"x: 1\r", b"x: \x00"):
        for _ in range(2):
            with pytest.raises(ApiError):
                parse_head(b"GET / HTTP/1.1\r\nHost: x\r\n%b\r\n\r\n" % malformed)
