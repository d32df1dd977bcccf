"""How the rows of one stream reach its client without a call of its reply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _nowhere(data: bytes) -> None:
    raise AssertionError("frames are written by their connection")


@dataclass(slots=True, frozen=True, eq=False, kw_only=True)
class WriteTarget:
    """Where the rows of a stream are written: as chunks to an HTTP/1.1 socket, or as frames of an HTTP/2
    connection."""

    descriptor: int = -1
    """Descriptor of the non-blocking socket of an HTTP/1.1 connection; -1: it is HTTP/2."""
    write_rest: Callable[[bytes], object] = _nowhere
    """HTTP/1.1: writes the rest of chunks that the socket has not taken."""
    window: int = -1
    """HTTP/2: the stream's slot in :class:`penstock.http.http2.flow_windows.FlowWindows`."""
    messages: bool = False
    """Rows are messages of a WebSocket, not chunks."""
    prefix: bytes = b""
    """HTTP/2: type, flags and stream id of the stream's DATA frames: what follows their length."""
