"""What the store reads and changes in a response object, and the event that it adds to those of a dead API
server."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from penstock.store.stored_response import StoredResponse

_encode = msgspec.json.Encoder().encode


class _Id(msgspec.Struct):
    id: Any = None


class _Object(msgspec.Struct):
    output: list[msgspec.Raw] = []


class Item(NamedTuple):
    """One input or output item."""

    id: str
    """Empty if it has none."""
    json: msgspec.Raw


_decode_object = msgspec.json.Decoder(_Object).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_id = msgspec.json.Decoder(_Id).decode


def outputs_of(response: StoredResponse) -> list[Item]:
    return [_item(raw) for raw in _decode_object(response.body).output]


def inputs_of(response: StoredResponse) -> list[Item]:
    return [_item(raw) for raw in _decode_list(response.input)]


def _item(raw: msgspec.Raw) -> Item:
    id = _decode_id(raw).id
    return Item(id if isinstance(id, str) else "", raw)


def output_ids(body: bytes) -> list[str]:
    """Ids of the output items of a response object."""
    return [item.id for raw in _decode_object(body).output if (item := _item(raw)).id]


def with_status(body: bytes, status: str, message: str | None = None) -> bytes:
    """A response object with another status, and an error if there is a ``message``."""
    fields: dict[str, Any] = msgspec.json.decode(body)
    fields["status"] = status
    if message is not None:
        fields["error"] = {"code": "server_error", "message": message}
    return _encode(fields)


def ending_event(name: str, number: int, body: bytes) -> bytes:
    """The last event of a response's stream."""
    event = {"type": name, "sequence_number": number, "response": msgspec.Raw(body)}
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(event))
