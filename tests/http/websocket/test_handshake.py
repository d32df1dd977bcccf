"""The opening handshake, with the example of RFC 6455 §1.3."""

from __future__ import annotations

import pytest

from penstock.http.errors import ApiError
from penstock.http.websocket.handshake import (
    HandshakeRefused,
    accepted,
    check_accepted,
    new_key,
    opening,
    wants_websocket,
)

KEY = b"dGhlIHNhbXBsZSBub25jZQ=="


def request(**changed: bytes) -> dict[bytes, bytes]:
    fields = dict(opening(KEY))
    return {**fields, **{name.replace("_", "-").encode(): value for name, value in changed.items()}}


def test_the_reply_is_that_of_the_standard() -> None:
    assert wants_websocket(request())
    reply = dict(accepted(request()))
    assert reply[b"sec-websocket-accept"] == b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
    check_accepted(101, reply, KEY)


def test_keys_differ() -> None:
    assert new_key() != new_key()
    accepted(dict(opening(new_key())))


@pytest.mark.parametrize(
    ("fields", "wants"),
    [
        (request(connection=b"keep-alive, upgrade", upgrade=b"WebSocket"), True),
        (request(connection=b"keep-alive"), False),
        (request(upgrade=b"h2c"), False),
        ({}, False),
    ],
)
def test_who_asks(fields: dict[bytes, bytes], wants: bool) -> None:
    assert wants_websocket(fields) is wants


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (request(sec_websocket_version=b"8"), 426),
        (request(sec_websocket_key=b"dGhl"), 400),
        (request(sec_websocket_key=b"!" * 24), 400),
    ],
)
def test_bad_handshakes_are_refused_with_their_header(fields: dict[bytes, bytes], status: int) -> None:
    with pytest.raises(ApiError) as refused:
        accepted(fields)
    assert refused.value.status == status
    assert (refused.value.param or "").startswith("Sec-WebSocket-")


@pytest.mark.parametrize(
    ("status", "changed"),
    [
        (200, {}),
        (101, {b"sec-websocket-accept": b"AAAA"}),
        (101, {b"upgrade": b"h2c"}),
        (101, {b"sec-websocket-extensions": b"permessage-deflate"}),
    ],
)
def test_a_client_checks_the_reply(status: int, changed: dict[bytes, bytes]) -> None:
    reply = {**dict(accepted(request())), **changed}
    with pytest.raises(HandshakeRefused):
        check_accepted(status, reply, KEY)
