"""What the store reads and changes in a response object, and the event that it adds to those of a dead API
server."""

from __future__ import annotations

from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode


class _Item(msgspec.Struct):
    id: str | None = None


class _Object(msgspec.Struct):
    output: list[_Item] = []


_decode_object = msgspec.json.Decoder(_Object).decode
_decode_items = msgspec.json.Decoder(list[_Item]).decode


def ids_of(data: bytes, field: str | None = None) -> list[str]:
    """The ids of a list of items, or of those of a response object's ``output``."""
    items = _decode_items(data) if field is None else _decode_object(data).output
    return [item.id for item in items if item.id]


def with_end(body: bytes, status: str, message: str | None = None) -> bytes:
    """A response object that has ended, by an error if there is a ``message``."""
    fields: dict[str, Any] = msgspec.json.decode(body)
    fields["status"] = status
    if message is not None:
        fields["error"] = {"code": "server_error", "message": message}
    return _encode(fields)


def ending_event(name: str, number: int, body: bytes) -> bytes:
    """The last event of a response's stream."""
    event = {"type": name, "sequence_number": number, "response": msgspec.Raw(body)}
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(event))
