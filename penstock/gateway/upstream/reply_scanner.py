"""Recognizes, in what a model server sends, events that are known but for their text.

Most frames or chunks of a stream are events that differ from the one before only in their text and number.
Those are recognized here, without an object each, and relayed together
(:mod:`penstock.gateway.relay.plain_events`).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from penstock.http.http2.faults import ConnectionFault, ErrorCode
from penstock.http.http2.frames import (
    DEFAULT_FRAME_SIZE,
    HEADER_BYTES,
    STREAM_BITS,
    Frame,
    FrameScanner,
    unpack_header,
)

FRAMES_AT_ONCE = 64
BYTES_AT_ONCE = 32 << 10
"""What is scanned between two looks at the clock."""
MAX_CHUNK_HEADER = 5
"""Bytes of a chunk's length and its line end: chunks of up to 4,095 bytes."""


class PlainEventShape(NamedTuple):
    """How plain events of one stream look: ``head``, a text, ``tail``. Instead of a text alone there may be a
    text, ``between`` and a number, or these the other way round."""

    head: bytes
    tail: bytes
    between: bytes
    """Empty: events have no number."""
    number_first: bool
    fixed: int
    """Bytes of head and tail."""
    slot: int
    """Slot of the stream in :class:`PlainEventRelay`."""


class PlainEventRelay(Protocol):
    """Relays plain events of many streams at once."""

    def relay_events(self, slots: list[int], events: list[bytes], texts: list[bytes], now: float) -> None:
        """Relay events. A text may still be something else than text, so that its event is not plain."""
        ...


def plain_text(event: bytes, shape: PlainEventShape) -> bytes | None:
    """The text of an event that may be plain, empty if its number is none; None: it has another shape."""
    head, tail, between, number_first, fixed, _ = shape
    text = event.removeprefix(head).removesuffix(tail)
    if len(text) + fixed != len(event):
        return None
    if between:
        text, _, number = text.partition(between)
        if number_first:
            text, number = number, text
        if not number.isdigit() or number.startswith(b"0"):
            return b""
    return text


def plain_chunk(data: bytes, shape: PlainEventShape) -> tuple[bytes, bytes] | None:
    """The event, and its text, if ``data`` is one chunk of HTTP/1.1 with an event that may be plain."""
    at = data.find(b"\r\n", 0, MAX_CHUNK_HEADER) + 2
    event = data[at:-2]
    if at < 3 or data[: at - 2].lower() != b"%x" % len(event) or not data.endswith(b"\r\n"):
        return None
    text = plain_text(event, shape)
    return None if text is None else (event, text)


class ReplyScanner(FrameScanner):
    """The bytes that one connection has received and not handled."""

    __slots__ = ("plain_shapes",)

    def __init__(self) -> None:
        super().__init__()
        self.plain_shapes: dict[int, PlainEventShape] = {}
        """Shapes by stream id. A frame that is no plain event ends the fast path of its stream, so that what
        follows it is not relayed before it."""

    def clear(self) -> None:
        super().clear()
        self.plain_shapes.clear()

    def take_events(self, slots: list[int], events: list[bytes], texts: list[bytes]) -> list[Frame]:
        """Take the next frames. Plain events among them, and their texts, are added to the lists instead.
        Raises ConnectionFault."""
        buffer, start, plain_shapes = self._buffer, self._start, self.plain_shapes
        find, add_slot, add_event, add_text = plain_shapes.get, slots.append, events.append, texts.append
        frames: list[Frame] = []
        size = len(buffer)
        stop = min(size - HEADER_BYTES, start + BYTES_AT_ONCE)
        while start <= stop:
            high, low, kind, flags, stream_id = unpack_header(buffer, start)
            at = start + HEADER_BYTES
            end = at + (high << 8 | low)
            if end > size:
                if end - at > DEFAULT_FRAME_SIZE and not (frames or slots):
                    reason = f"a frame of {end - at} bytes is larger than {DEFAULT_FRAME_SIZE}"
                    raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, reason)
                break
            payload = buffer[at:end]
            start = end
            if (shape := find(stream_id)) is not None:
                text = None if kind or flags else plain_text(payload, shape)
                if text is not None:
                    add_slot(shape.slot)
                    add_event(payload)
                    add_text(text)
                    continue
                del plain_shapes[stream_id]
            frames.append((kind, flags, stream_id & STREAM_BITS, payload))
            if len(frames) >= FRAMES_AT_ONCE:
                break
        self._start = start
        return frames
