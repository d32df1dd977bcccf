"""A message, and the request that it stands for."""

from __future__ import annotations

import msgspec
import pytest

from penstock.gateway.websocket.create_message import read_message
from penstock.http.errors import ApiError


@pytest.mark.parametrize(
    ("message", "body", "lane", "prewarm"),
    [
        (b'{"type":"response.create","model":"m"}', b'{"stream":true,"model":"m"}', None, False),
        (
            b'{"type":"response.create","model":"m","stream":true,"a":1}',
            b'{"stream":true,"model":"m","a":1}',
            None,
            False,
        ),
        (b'{"type":"response.create","stream":true,"a":1}', b'{"stream":true,"a":1}', None, False),
        (b' { "type" : "response.create" , "a":1}', b'{"stream":true, "a":1}', None, False),
        (
            b'{"a":"\\"stream\\"","type":"response.create"}',
            b'{"a":"\\"stream\\"","stream":true}',
            None,
            False,
        ),
        (b'{"type":"response.create","stream":false,"b":1}', b'{"stream":true,"b":1}', None, False),
        (b'{"type":"response.create","stream_id":"l","b":1}', b'{"b":1,"stream":true}', "l", False),
        (b'{"type":"response.create","generate":false}', b'{"stream":true}', None, True),
        (b'{"type":"response.create","generate":true}', b'{"stream":true}', None, False),
    ],
)
def test_the_request_of_a_message(message: bytes, body: bytes, lane: str | None, prewarm: bool) -> None:
    create = read_message(message)
    assert create is not None
    assert create.raw == body
    assert (create.lane, create.prewarm) == (lane, prewarm)
    assert create.sent_as(create.raw) is message


def test_a_message_for_another_model() -> None:
    create = read_message(b'{"type":"response.create","model":"m","stream_id":"l","generate":false,"a":1}')
    assert create is not None
    sent = create.sent_as(create.raw.replace(b'"m"', b'"n"'))
    assert msgspec.json.decode(sent) == {
        "type": "response.create",
        "model": "n",
        "stream_id": "l",
        "generate": False,
        "a": 1,
    }


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"1",
        b"{",
        b"{}",
        b'{"type":1}',
        b'{"type":"response.steer"}',
        b'{"type":"response.create","stream_id":""}',
        b'{"type":"response.create","model":"m","input":"x","type":"response.cancel"}',
        b'{"type":"response.create","model":"m","input":[{"type":"message"}],"t\\u0079pe":"response.cancel"}',
    ],
)
def test_what_is_no_message(message: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        read_message(message)
    assert refused.value.status == 400
