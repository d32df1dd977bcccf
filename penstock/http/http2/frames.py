"""Frames of HTTP/2 (RFC 9113 §4 and §6): constants, encoding, and the splitting of received bytes.

Servers and clients alike use this module: it knows no direction and no stream.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final, TypeAlias

from penstock.http.http2.faults import ConnectionFault, ErrorCode

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What a client sends first."""

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

END_STREAM: Final = 0x1
"""Flag of DATA and HEADERS."""
ACK: Final = 0x1
"""Flag of SETTINGS and PING."""
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITY_FLAG: Final = 0x20

HEADER_TABLE_SIZE: Final = 1
ENABLE_PUSH: Final = 2
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5
MAX_HEADER_LIST_SIZE: Final = 6
ENABLE_CONNECT_PROTOCOL: Final = 8

DEFAULT_WINDOW: Final = 65_535
"""Window of a connection, and of its streams until SETTINGS say otherwise."""
MAX_WINDOW: Final = 2**31 - 1
DEFAULT_FRAME_SIZE: Final = 16_384
"""Maximum payload of a frame until SETTINGS say otherwise, which may not say less."""
LARGEST_FRAME_SIZE: Final = 2**24 - 1
HEADER_BYTES: Final = 9
"""Bytes of a frame before its payload."""
STREAM_BITS: Final = 0x7FFF_FFFF

Frame: TypeAlias = tuple[int, int, int, bytes]
"""Type, flags, stream id, payload."""

_HEADER = struct.Struct(">HBBBL")
_pack_header = _HEADER.pack
unpack_header = _HEADER.unpack_from
_SETTING = struct.Struct(">HL")


def frame_header(length: int, kind: int, flags: int, stream_id: int) -> bytes:
    return _pack_header(length >> 8, length & 0xFF, kind, flags, stream_id)


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    length = len(payload)
    return _pack_header(length >> 8, length & 0xFF, kind, flags, stream_id) + payload


def data_prefix(stream_id: int) -> bytes:
    """What follows the three bytes of the length in the header of each DATA frame of a stream."""
    return b"\0\0" + stream_id.to_bytes(4, "big")


def header_frames(stream_id: int, block: bytes, *, end_stream: bool, max_frame_size: int) -> bytes:
    """A header block as HEADERS, and CONTINUATION frames where it is longer than one frame may be."""
    flags = END_STREAM if end_stream else 0
    if len(block) <= max_frame_size:
        return frame(HEADERS, flags | END_HEADERS, stream_id, block)
    frames = [frame(HEADERS, flags, stream_id, block[:max_frame_size])]
    for start in range(max_frame_size, len(block), max_frame_size):
        piece = block[start : start + max_frame_size]
        last = start + max_frame_size >= len(block)
        frames.append(frame(CONTINUATION, END_HEADERS if last else 0, stream_id, piece))
    return b"".join(frames)


def settings_frame(settings: Mapping[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join([_SETTING.pack(*setting) for setting in settings.items()]))


SETTINGS_ACK: Final = frame(SETTINGS, ACK, 0)


def window_update(stream_id: int, increment: int) -> bytes:
    """``stream_id`` 0: for the connection."""
    return frame(WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4, "big"))


def ping(payload: bytes, *, ack: bool = False) -> bytes:
    """``payload``: 8 bytes."""
    return frame(PING, ACK if ack else 0, 0, payload)


def rst_stream(stream_id: int, code: int) -> bytes:
    return frame(RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))


def goaway(last_stream_id: int, code: int, reason: str = "") -> bytes:
    return frame(GOAWAY, 0, 0, struct.pack(">LL", last_stream_id, code) + reason.encode())


def unpack_settings(payload: bytes) -> list[tuple[int, int]]:
    """Identifiers and values, in order. Raises ConnectionFault."""
    if len(payload) % _SETTING.size:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "the length of SETTINGS is no multiple of 6")
    return list(_SETTING.iter_unpack(payload))


def unpack_goaway(payload: bytes) -> tuple[int, int, bytes]:
    """Last stream id, error code, debug data. Raises ConnectionFault."""
    if len(payload) < 8:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY is shorter than 8 bytes")
    last, code = struct.unpack_from(">LL", payload)
    return last & STREAM_BITS, code, payload[8:]


def unpack_long(payload: bytes, name: str) -> int:
    """The error code of RST_STREAM or the increment of WINDOW_UPDATE. Raises ConnectionFault."""
    if len(payload) != 4:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"the length of {name} is not 4")
    return int.from_bytes(payload, "big")


def without_padding(flags: int, payload: bytes) -> bytes:
    """The payload of DATA or HEADERS without its padding. Raises ConnectionFault."""
    if not flags & PADDED:
        return payload
    if not payload:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a padded frame has no length of its padding")
    end = len(payload) - payload[0]
    if end < 1:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the padding of a frame is longer than its payload")
    return payload[1:end]


class FrameScanner:
    """Splits the bytes that a connection receives into frames."""

    __slots__ = ("_buffer", "_max_frame_size", "_start")

    def __init__(self, max_frame_size: int = DEFAULT_FRAME_SIZE) -> None:
        """``max_frame_size``: maximum payload, as announced to the peer."""
        self._max_frame_size = max_frame_size
        self._buffer = b""
        self._start = 0
        """Where the first frame that has not been taken starts in the buffer."""

    @property
    def waiting(self) -> int:
        """Bytes that have come and have not been taken."""
        return len(self._buffer) - self._start

    def receive(self, data: bytes) -> None:
        start = self._start
        if start == len(self._buffer):
            self._buffer = data
        else:
            self._buffer = self._buffer[start:] + data
        self._start = 0

    def clear(self) -> None:
        self._buffer, self._start = b"", 0

    def take_bytes(self, limit: int) -> bytes:
        """Up to ``limit`` bytes that are no frame: of the preface."""
        start = self._start
        self._start = end = min(start + limit, len(self._buffer))
        return self._buffer[start:end]

    def take_frames(self, limit: int) -> list[Frame]:
        """Up to ``limit`` complete frames; fewer: there are no more. Raises ConnectionFault."""
        buffer, start, largest = self._buffer, self._start, self._max_frame_size
        size, frames = len(buffer), list[Frame]()
        while start + HEADER_BYTES <= size and len(frames) < limit:
            high, low, kind, flags, stream_id = unpack_header(buffer, start)
            length = high << 8 | low
            if length > largest:
                if frames:  # which are handled first
                    break
                raise ConnectionFault(
                    ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes is larger than {largest}"
                )
            end = start + HEADER_BYTES + length
            if end > size:
                break
            frames.append((kind, flags, stream_id & STREAM_BITS, buffer[start + HEADER_BYTES : end]))
            start = end
        self._start = start
        return frames
