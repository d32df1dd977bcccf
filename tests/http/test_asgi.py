"""Reading a request's headers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.http.asgi import first_headers, forget_headers, read_body, request_header
from penstock.http.errors import ApiError

Headers = list[tuple[bytes, bytes]]


def test_the_first_of_several_headers_counts_until_they_are_forgotten() -> None:
    scope: dict[str, Any] = {"headers": [(b"a", b"1"), (b"b", b"\xe9"), (b"a", b"2")]}
    assert first_headers(scope) == {b"a": b"1", b"b": b"\xe9"}
    assert (request_header(scope, b"a"), request_header(scope, b"b")) == ("1", "é")
    assert request_header(scope, b"c") is None
    forget_headers(scope)
    assert request_header(scope, b"a") is None


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ([(b"content-encoding", b"gzip")], "Content-Encoding"),
        ([(b"content-encoding", b"identity"), (b"content-encoding", b"gzip")], "Content-Encoding"),
        ([(b"content-type", b"application/json"), (b"content-type", b"text/plain")], "Content-Type"),
        ([(b"content-type", b"text/plain"), (b"content-encoding", b"br")], "Content-Encoding"),
        ([(b"content-type", b"application/json; charset=utf-8"), (b"content-encoding", b"Identity")], None),
        ([(b"content-type", b"application/x+json")], None),
        ([], None),
    ],
)
def test_every_header_of_the_body_is_checked(headers: Headers, param: str | None) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def read() -> bytes:
        return await read_body({"headers": headers}, receive, 10)

    if param is None:
        assert asyncio.run(read()) == b"{}"
        return
    with pytest.raises(ApiError) as caught:
        asyncio.run(read())
    assert caught.value.param == param
