"""What a model server sends about a response: as an event of a stream, and as a message of a WebSocket."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.gateway.routing.pick_request import OWNER_UNAVAILABLE

ERROR = b"error"
ENDS = frozenset(
    {b"response.completed", b"response.incomplete", b"response.failed", b"response.cancelled", ERROR}
)
"""Types of the last message of a response."""
PREVIOUS = "previous_response_id"
NOT_FOUND = "previous_response_not_found"
"""Code of an error after which clients send the whole conversation."""
MAX_TEXT = 2000
"""Characters of a reply that is no JSON, in the message that is made of it."""
_begins_with_type = re.compile(rb'\s*\{\s*"type"\s*:\s*"([^"\\]{1,100})"').match
_RETOLD = (b"retry-after", b"retry-after-ms", b"x-request-id")
"""Headers of an error that its message has."""


class _Typed(msgspec.Struct, gc=False):
    type: Any = None
    status: Any = None
    headers: Any = None


_typed = msgspec.json.Decoder(_Typed).decode
_object = msgspec.json.Decoder(dict[str, Any]).decode


def type_of(data: bytes) -> bytes:
    """The type of a message; empty: it has none."""
    found = _begins_with_type(data)
    if found is not None:
        return found[1]
    kind = _read(data).type
    return kind.encode() if isinstance(kind, str) else b""


def refusal_in(data: bytes) -> tuple[int, list[tuple[bytes, bytes]]] | None:
    """Status and headers of the reply over HTTP for which an error stands; None: it names no status."""
    read = _read(data)
    if not isinstance(read.status, int) or not 400 <= read.status < 600:
        return None
    headers = [(b"content-type", b"application/json")]
    if isinstance(read.headers, dict):
        pairs = [(str(name).lower().encode(), str(value)) for name, value in read.headers.items()]
        headers += [
            (name, value.encode()) for name, value in pairs if name in _RETOLD and value.isprintable()
        ]
    return read.status, headers


def as_event(data: bytes) -> bytes:
    """A message as an event of a stream."""
    if b"\n" in data or b"\r" in data:  # between fields: they are escaped within strings
        data = data.replace(b"\r", b" ").replace(b"\n", b"\ndata: ")
    return b"data: %b\n\n" % data


def in_lane(data: bytes, lane: str | None) -> bytes:
    """A message that names its lane."""
    if lane is None or b'"stream_id"' in data:
        return data
    return b'{"stream_id":%b,%b' % (msgspec.json.encode(lane), data.lstrip()[1:])


def error_message(
    body: bytes, status: int, headers: Sequence[tuple[bytes, bytes]] = (), *, continues: bool = False
) -> tuple[int, bytes]:
    """An error as clients of WebSockets read it, and its status: of the ``body`` of a reply with ``status``,
    or of an event. What is one already stays as it is. ``continues``: the request continues a response."""
    try:
        fields = _object(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        fields = {"message": body[:MAX_TEXT].decode(errors="replace")}
    error = fields.get("error")
    if not isinstance(error, dict):
        error = {name: fields.get(name) for name in ("type", "code", "message", "param")}
        error["message"] = str(error["message"] or error_text(fields))[:MAX_TEXT]
        if error["type"] in (None, "error"):
            error["type"] = "server_error"
    elif fields.get("type") == "error" and isinstance(fields.get("status"), int):
        return fields["status"], body
    lost = error.get("code") in (NOT_FOUND, OWNER_UNAVAILABLE)
    if lost or (continues and (status == 404 or error.get("param") == PREVIOUS)):
        # Whoever holds a WebSocket has the conversation, and sends it once it is told so.
        status, error = 400, {**error, "code": NOT_FOUND}
    message = {"type": "error", "status": status, "error": error}
    if "sequence_number" in fields:
        message["sequence_number"] = fields["sequence_number"]
    retold = {name.decode(): value.decode("latin-1") for name, value in headers if name in _RETOLD}
    if retold:
        message["headers"] = retold
    return status, msgspec.json.encode(message)


def error_text(fields: Mapping[str, Any]) -> str:
    """What a server of a foreign shape says."""
    return next(
        (str(fields[name]) for name in ("error", "detail", "errors") if fields.get(name)), "no reason"
    )


def _read(data: bytes) -> _Typed:
    try:
        return _typed(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Typed()
