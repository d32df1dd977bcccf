"""What the two ends of an HTTP/2 connection differ in, and what each bears of the other."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from penstock.http.http1.request_head import MAX_HEADERS
from penstock.http.http2 import frames
from penstock.http.http2.rates import CONTROL_BURST

MAX_STREAMS: Final = 2048
"""Requests of one client's connection at a time, with those whose client has gone and whose work has not
ended."""
STREAM_WINDOW: Final = 256 * 1024
"""Bytes of a request's body that a client may send before the application asks for more."""
CONNECTION_WINDOW: Final = 1024 * 1024
"""Bytes of all bodies that a client may send before WINDOW_UPDATE; it gets that as soon as they are read."""
BLOCK_BYTES_PER_LIST_BYTE: Final = 2
"""An encoded header block may be this many times as long as the list, which is then refused with 431."""
SMALL_DATA: Final = 64
"""Smaller DATA frames within a request's body count as frames that carry nothing."""
HEADER_BYTES_PER_CONTROL: Final = 256
"""Bytes of a request's header block that count as a control frame: to decode them takes up to 80
microseconds."""

MAX_REPLY_HEADER_BYTES: Final = 64 << 10
"""Maximum size of the header list of a reply, and of its block."""
MAX_REPLY_HEADERS: Final = 256
MAX_REPLY_BLOCK_FRAMES: Final = 16
"""Frames of one header block of a reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One end of a connection."""

    is_client: bool
    receive_window: int
    """Bytes that the peer may send on all streams together before WINDOW_UPDATE."""
    announced: Mapping[int, int]
    """This end's SETTINGS."""
    max_header_bytes: int
    """Maximum size of a header list."""
    max_headers: int
    max_block_bytes: int
    """Maximum size of a header block of several frames."""
    max_block_frames: int = sys.maxsize
    small_data: int
    """Bytes of content below which a DATA frame that does not end its stream counts as a control frame."""
    header_bytes_per_control: int = sys.maxsize
    """Bytes of a header block that count as a control frame."""
    window_changes: int = sys.maxsize
    """Changes of all windows by SETTINGS that are borne at once, and a tenth of them per second."""
    control_burst: int = CONTROL_BURST
    """Frames that carry nothing that are borne at once."""
    hello: bytes = field(init=False)
    """What this end sends first."""

    def __post_init__(self) -> None:
        start = frames.PREFACE if self.is_client else b""
        window = frames.window_update(0, self.receive_window - frames.DEFAULT_WINDOW)
        object.__setattr__(self, "hello", start + frames.settings_frame(self.announced) + window)


@lru_cache(maxsize=8)
def server_role(max_header_bytes: int) -> Role:
    return Role(
        is_client=False,
        receive_window=CONNECTION_WINDOW,
        announced={
            frames.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
            frames.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
            frames.MAX_HEADER_LIST_SIZE: max_header_bytes,
            frames.ENABLE_CONNECT_PROTOCOL: 1,
        },
        max_header_bytes=max_header_bytes,
        max_headers=MAX_HEADERS,
        max_block_bytes=BLOCK_BYTES_PER_LIST_BYTE * max_header_bytes,
        small_data=SMALL_DATA,
        header_bytes_per_control=HEADER_BYTES_PER_CONTROL,
    )


def client_role(
    *, receive_window: int, stream_window: int, window_changes: int, control_burst: int = CONTROL_BURST
) -> Role:
    """``receive_window``: bytes that the server may send on all streams before WINDOW_UPDATE;
    ``stream_window``: the same on one."""
    return Role(
        is_client=True,
        receive_window=receive_window,
        announced={
            frames.ENABLE_PUSH: 0,
            frames.INITIAL_WINDOW_SIZE: stream_window,
            frames.MAX_HEADER_LIST_SIZE: MAX_REPLY_HEADER_BYTES,
        },
        max_header_bytes=MAX_REPLY_HEADER_BYTES,
        max_headers=MAX_REPLY_HEADERS,
        max_block_bytes=MAX_REPLY_HEADER_BYTES,
        max_block_frames=MAX_REPLY_BLOCK_FRAMES,
        small_data=1,
        window_changes=window_changes,
        control_burst=control_burst,
    )
