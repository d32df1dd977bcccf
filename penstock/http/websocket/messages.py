"""How server-sent events become messages of a WebSocket: of ``event: NAME`` and ``data: JSON``, the JSON."""

from __future__ import annotations

EVENT_END = b"\n\n"
_DATA = b"data: "


def message_of(event: bytes) -> bytes:
    """The message of an event without :data:`EVENT_END`, or the start of one of the start of the other."""
    return event.partition(_DATA)[2]
