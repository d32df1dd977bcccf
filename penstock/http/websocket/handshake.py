"""The opening handshake of a WebSocket over HTTP/1.1 (RFC 6455 §4), for a server and for a client.

A server asks :func:`wants_websocket` and answers 101 with the headers of :func:`accepted`. A client sends the
headers of :func:`opening` with a GET, and gives status and headers of the reply to :func:`check_accepted`.
No subprotocol and no extension is offered or taken; without permessage-deflate, messages are not compressed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from collections.abc import Mapping

from penstock.http.errors import ApiError
from penstock.http.sink import Headers

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_VERSION = b"13"


class HandshakeRefused(Exception):
    """A server has not accepted the handshake as it must."""


# -- a server


def wants_websocket(fields: Mapping[bytes, bytes]) -> bool:
    """Whether a request with these headers asks to become a WebSocket. ``fields``: by name in lower case."""
    return b"websocket" in _tokens(fields.get(b"upgrade", b"")) and b"upgrade" in _tokens(
        fields.get(b"connection", b"")
    )


def accepted(fields: Mapping[bytes, bytes], *, connects: bool = False) -> Headers:
    """The headers of the reply 101 to such a request. ``connects``: it is a CONNECT of HTTP/2 (RFC 8441),
    which has no key, and gets 200. Raises ApiError."""
    version = fields.get(b"sec-websocket-version", b"")
    if version != _VERSION:
        shown = version[:32].decode("latin-1")
        raise ApiError(
            426,
            f"Sec-WebSocket-Version is {shown!r}; this server speaks version 13.",
            param="Sec-WebSocket-Version",
            headers=[(b"sec-websocket-version", _VERSION), (b"upgrade", b"websocket")],
        )
    if connects:
        return []
    key = fields.get(b"sec-websocket-key", b"")
    try:
        valid = len(base64.b64decode(key, validate=True)) == 16
    except binascii.Error:
        valid = False
    if not valid:
        raise ApiError(
            400, "Sec-WebSocket-Key must be 16 bytes in base64 (RFC 6455 §4.1).", param="Sec-WebSocket-Key"
        )
    return [
        (b"upgrade", b"websocket"),
        (b"connection", b"Upgrade"),
        (b"sec-websocket-accept", _accept_of(key)),
    ]


# -- a client


def new_key() -> bytes:
    """A value of Sec-WebSocket-Key, for one handshake."""
    return base64.b64encode(secrets.token_bytes(16))


def opening(key: bytes) -> Headers:
    """The headers of a GET that opens a WebSocket, beside Host and the application's own."""
    return [
        (b"connection", b"Upgrade"),
        (b"upgrade", b"websocket"),
        (b"sec-websocket-version", _VERSION),
        (b"sec-websocket-key", key),
    ]


def check_accepted(status: int, fields: Mapping[bytes, bytes], key: bytes) -> None:
    """Check the reply to a handshake with ``key``. Raises HandshakeRefused; for any status but 101 the body
    says why. ``fields``: by name in lower case."""
    if status != 101:
        raise HandshakeRefused(f"the server answered {status}, not 101")
    if not wants_websocket(fields):
        raise HandshakeRefused("the server switched to another protocol than websocket")
    if fields.get(b"sec-websocket-accept", b"").strip() != _accept_of(key):
        raise HandshakeRefused("the server's Sec-WebSocket-Accept is wrong")
    for name in (b"sec-websocket-extensions", b"sec-websocket-protocol"):
        if fields.get(name, b"").strip():
            raise HandshakeRefused(f"the server chose a {name.decode()} that was not offered")


def _accept_of(key: bytes) -> bytes:
    return base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest())


def _tokens(value: bytes) -> list[bytes]:
    return [token.strip() for token in value.lower().split(b",")]
