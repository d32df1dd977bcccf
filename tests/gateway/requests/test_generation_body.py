"""When the body of a request that generates is relayed before its end, and what it may not say there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import cast

import pytest

from penstock.gateway.requests.body_rest import BodyLimits, ReceivedBody
from penstock.gateway.requests.byte_rounds import ByteRounds
from penstock.gateway.requests.caller import ANYONE, Caller
from penstock.gateway.requests.generation_body import CheckedRest, HeldRest, read_generation
from penstock.gateway.requests.long_values import LongValues
from penstock.gateway.requests.request_body import RequestBody, read_request
from penstock.http.errors import ApiError
from penstock.http.request import HttpRequest
from tests.gateway.requests.test_long_values import OTHER, PICTURE, chat

PARTS = 40_000
LIMITS = BodyLimits(1 << 20, 1 << 21)
FIRST = b'{"model":"m",' + chat(PICTURE, OTHER).replace(b', "model": "m"', b"")[1:]


class Request:
    """A request whose body comes in parts."""

    def __init__(self, body: bytes, path: str, headers: Mapping[bytes, bytes]) -> None:
        self.path, self.target, self.headers = path, path.encode(), list(headers.items())
        self.fields = {b"content-length": b"%d" % len(body), **headers}
        self.body_complete = False
        self.sink = self
        self._parts = (body[at : at + PARTS] for at in range(0, len(body), PARTS))

    def header(self, name: bytes) -> str | None:
        return self.fields[name].decode() if name in self.fields else None

    def release(self, kept: int = 0) -> None:
        self.kept = kept

    async def read_part(self) -> bytes:
        return next(self._parts, b"")


def read(
    body: bytes, path: str = "/v1/chat/completions", caller: Caller = ANYONE, **headers: bytes
) -> ReceivedBody:
    named = {name.replace("_", "-").encode(): value for name, value in headers.items()}
    return asyncio.run(read_generation(cast(HttpRequest, Request(body, path, named)), caller, LIMITS))


def rest_of(received: ReceivedBody) -> CheckedRest:
    assert isinstance(received.rest, CheckedRest)

    def check(text: bytes, values: LongValues) -> RequestBody:
        return read_request(text, values=values)

    received.rest.check = check
    return received.rest


def parts(rest: CheckedRest | HeldRest) -> Iterator[bytes]:
    while part := asyncio.run(rest.read()):
        yield part


def test_the_rest_is_relayed_once_the_model_is_known() -> None:
    received = read(FIRST)
    assert read_request(received.text).model == "m"
    rest = rest_of(received)
    assert received.came == len(rest.beginning) < len(FIRST) // 3
    sent = [*parts(rest)]
    assert rest.beginning + b"".join(sent) == FIRST
    assert len(sent) > 4
    assert rest.body is not None
    assert rest.body.pictures == 2


def test_a_header_names_the_model_that_stands_last() -> None:
    named = read(chat(PICTURE, OTHER), x_gateway_model_name=b"m")
    assert rest_of(named).model == "m"
    assert read(chat(PICTURE, OTHER)).rest is None


@pytest.mark.parametrize(
    ("path", "caller"),
    [
        ("/v1/responses", ANYONE),
        ("/v1/chat/completions", Caller("k", models=("m",))),
        ("/v1/chat/completions", Caller("k", most_concurrent=1)),
    ],
)
def test_a_body_whose_end_counts_is_held(path: str, caller: Caller) -> None:
    received = read(FIRST, path, caller)
    assert received.rest is None
    assert received.size == len(FIRST)
    pieces = received.values.filled(received.text)
    assert b"".join(pieces) == FIRST
    for _ in range(2):
        held = HeldRest(pieces[1:], ByteRounds())
        assert held.left == len(FIRST) - len(pieces[0])
        assert pieces[0] + b"".join(parts(held)) == FIRST


def test_a_body_that_ends_otherwise_never_ends_at_the_server() -> None:
    for end in (b',"model":"other"}', b',"Model":"m"}', b"]}", b""):
        body = FIRST[:-1] + end
        rest, sent = rest_of(read(body)), []
        with pytest.raises(ApiError):
            sent = [*parts(rest)]
        assert rest.body is None
        assert sum(map(len, sent)) + len(rest.beginning) < len(body)


def test_a_body_that_ends_within_base64_is_held() -> None:
    cut = FIRST[: 2 * PARTS]
    received = read(cut)
    assert received.rest is None, "the server would get all of it"
    with pytest.raises(ApiError):
        read_request(received.text)


def test_text_that_is_kept_to_be_checked_is_counted() -> None:
    text = b"word " * 50_000
    rest = rest_of(read(FIRST[:-1] + b',"user":"%b"}' % text))
    most = 0
    for _ in parts(rest):
        most = max(most, cast(Request, rest._http).kept)
    assert len(text) - 2 * PARTS < most < len(text) + PARTS


def test_the_rest_can_be_held() -> None:
    received = read(FIRST)
    held = asyncio.run(rest_of(received).hold())
    assert b"".join(held.values.filled(held.text)) == FIRST


def test_no_more_is_held_than_may_be() -> None:
    long = b'"text":"%b",' % (b"x " * (1 << 19))
    for late in (b"{" + long + FIRST[1:], FIRST[:-1] + b"," + long[:-1] + b"}"):
        with pytest.raises(ApiError, match="max-request-bytes"):
            asyncio.run(rest_of(read(late, content_length=b"500000")).hold())
