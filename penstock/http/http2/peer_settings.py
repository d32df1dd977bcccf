"""What a peer's SETTINGS say, within what RFC 9113 §6.5.2 allows."""

from __future__ import annotations

from penstock.http.http2 import frames
from penstock.http.http2.faults import ConnectionFault, ErrorCode
from penstock.http.http2.header_blocks import NO_TABLE, TABLE_SIZE


class PeerSettings:
    """The settings of a peer that matter: it gets no pushes, and no frame larger than all peers accept."""

    __slots__ = ("_max_push", "block_start", "header_table_size", "initial_window", "max_streams")

    def __init__(self, *, is_client: bool) -> None:
        """``is_client``: this end is, so that its peer may not want pushes."""
        self._max_push = 0 if is_client else 1
        self.max_streams = frames.MAX_WINDOW
        """Streams that the peer allows at a time."""
        self.header_table_size = TABLE_SIZE
        """Maximum size of the peer's table of header fields."""
        self.initial_window = frames.DEFAULT_WINDOW
        """Send window of streams that open."""
        self.block_start = b""
        """What every header block that is sent begins with."""

    def apply(self, payload: bytes) -> None:
        """Take over the settings of one SETTINGS frame; unknown ones are ignored. Raises ConnectionFault."""
        for identifier, value in frames.unpack_settings(payload):
            if identifier == frames.INITIAL_WINDOW_SIZE:
                if value > frames.MAX_WINDOW:
                    raise ConnectionFault(
                        ErrorCode.FLOW_CONTROL_ERROR, f"SETTINGS_INITIAL_WINDOW_SIZE {value} is above 2^31-1"
                    )
                self.initial_window = value
            elif identifier == frames.HEADER_TABLE_SIZE:
                self.header_table_size = value
                if value < TABLE_SIZE:
                    self.block_start = NO_TABLE
            elif identifier == frames.MAX_CONCURRENT_STREAMS:
                self.max_streams = value
            elif identifier == frames.MAX_FRAME_SIZE:
                if not frames.DEFAULT_FRAME_SIZE <= value <= frames.LARGEST_FRAME_SIZE:
                    raise ConnectionFault(
                        ErrorCode.PROTOCOL_ERROR, f"SETTINGS_MAX_FRAME_SIZE {value} is not 16384 to 2^24-1"
                    )
            elif identifier == frames.ENABLE_PUSH and value > self._max_push:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"SETTINGS_ENABLE_PUSH {value}")
