"""Puts header blocks together from HEADERS and CONTINUATION frames (RFC 9113 §4.3), within a bound."""

from __future__ import annotations

from penstock.http.http2 import frames
from penstock.http.http2.faults import ConnectionFault, ErrorCode

Block = tuple[int, int, bytes]
"""Flags of HEADERS, stream id, block."""


class BlockAssembler:
    """The header blocks of one connection, of which one may be incomplete."""

    __slots__ = ("_block", "_flags", "_frames", "_max_bytes", "_max_frames", "stream_id")

    def __init__(self, max_bytes: int, max_frames: int) -> None:
        """The bounds are those of a block of several frames."""
        self._max_bytes = max_bytes
        self._max_frames = max_frames
        self._flags = self._frames = 0
        self._block = bytearray()
        self.stream_id = 0
        """Stream of the incomplete block; 0: there is none."""

    @property
    def waiting(self) -> int:
        """Bytes of the incomplete block."""
        return len(self._block)

    def on_headers(self, flags: int, stream_id: int, payload: bytes) -> Block | None:
        """Return the block, if it is complete with this frame. Raises ConnectionFault."""
        if not stream_id & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"HEADERS on stream {stream_id}")
        block = frames.without_padding(flags, payload) if flags & frames.PADDED else payload
        if flags & frames.PRIORITY_FLAG:
            if len(block) < 5:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "HEADERS are too short for a priority")
            check_dependency(stream_id, block)
            block = block[5:]
        if flags & frames.END_HEADERS:
            return flags, stream_id, block
        self._flags, self._frames, self.stream_id = flags, 1, stream_id
        self._block += block
        return None

    def on_continuation(self, flags: int, stream_id: int, payload: bytes) -> Block | None:
        """Return the block, if it is complete with this frame, which is known to be of its stream. Raises
        ConnectionFault."""
        if not self.stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS before it")
        self._block += payload
        self._frames += 1
        if len(self._block) > self._max_bytes or self._frames > self._max_frames:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "a header block is too large")
        if not flags & frames.END_HEADERS:
            return None
        block = bytes(self._block)
        self.clear()
        return self._flags, stream_id, block

    def clear(self) -> None:
        self.stream_id = 0
        self._block.clear()


def check_dependency(stream_id: int, priority: bytes) -> None:
    """Priorities are ignored, but no stream depends on itself (RFC 7540 §5.3.1). Raises ConnectionFault."""
    if int.from_bytes(priority[:4], "big") & frames.STREAM_BITS == stream_id:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a stream depends on itself")
