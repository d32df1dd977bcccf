"""What a connection knows of its closed streams, of which frames may still come (RFC 9113 §5.1)."""

from __future__ import annotations

from collections import deque

from penstock.http.http2 import frames
from penstock.http.http2.faults import ErrorCode, StreamFault
from penstock.http.http2.roles import STREAM_WINDOW
from penstock.http.server_state import LINGER_S, MAX_LINGER_BYTES

MAX_CUT_IDS = 1024
"""Streams that were ended before their request, whose frames are ignored; those of others are faults."""
MAX_CLOSED_IDS = 256
"""Streams that are remembered as closed, for the error code alone."""


class _Answered:
    """What still comes of a request whose reply is sent."""

    __slots__ = ("since", "size", "window")

    def __init__(self, window: int, since: float) -> None:
        self.window = window
        """Bytes that the client may send."""
        self.size = 0
        """Bytes that were discarded."""
        self.since = since


class ClosedStreams:
    """The rest of a request that was answered early is discarded for a while: some clients lose the reply if
    they are told at once to stop. After that, and after other resets, what comes is ignored."""

    __slots__ = ("_answered", "_closed", "_cut")

    def __init__(self) -> None:
        self._answered: dict[int, _Answered] = {}
        self._cut: dict[int, None] = {}
        self._closed = deque[int](maxlen=MAX_CLOSED_IDS)

    @property
    def unfinished(self) -> int:
        """Requests that are answered, and whose bodies still come."""
        return len(self._answered)

    def add(self, stream_id: int) -> None:
        self._closed.append(stream_id)

    def was_open(self, stream_id: int) -> bool:
        """Whether the stream has been open, if that was not long ago."""
        return stream_id in self._closed

    def add_answered(self, stream_id: int, window: int, now: float) -> None:
        """The reply is sent, and the body still comes; ``window``: bytes that the client may send."""
        self._answered[stream_id] = _Answered(window, now)

    def cut(self, stream_id: int, code: ErrorCode) -> bytes:
        """RST_STREAM, after which the client may still have sent frames of the stream."""
        self._answered.pop(stream_id, None)
        if len(self._cut) >= MAX_CUT_IDS:
            del self._cut[next(iter(self._cut))]
        self._cut[stream_id] = None
        return frames.rst_stream(stream_id, code)

    def on_rst_stream(self, stream_id: int) -> None:
        self._answered.pop(stream_id, None)

    def on_trailers(self, stream_id: int, *, last: bool) -> bool:
        """Whether they are ignored."""
        if last and self._answered.pop(stream_id, None) is not None:
            return True
        return stream_id in self._cut

    def on_data(self, stream_id: int, size: int, *, last: bool) -> bytes:
        """What is sent for DATA of a closed stream. Raises StreamFault."""
        answered = self._answered.get(stream_id)
        if answered is None:
            if stream_id in self._cut:
                return b""
            raise StreamFault(stream_id, ErrorCode.STREAM_CLOSED, "DATA on a closed stream")
        answered.window -= size
        answered.size += size
        if answered.window < 0:
            raise StreamFault(stream_id, ErrorCode.FLOW_CONTROL_ERROR, "DATA beyond the window of a stream")
        if last:
            del self._answered[stream_id]
        elif answered.size > MAX_LINGER_BYTES:
            return self.cut(stream_id, ErrorCode.NO_ERROR)
        elif answered.window < STREAM_WINDOW // 2:
            more = STREAM_WINDOW - answered.window
            answered.window = STREAM_WINDOW
            return frames.window_update(stream_id, more)
        return b""

    def sweep(self, now: float) -> bytes:
        """What is sent to clients that go on with a request for too long (RFC 9113 §8.1)."""
        late = [each for each, answered in self._answered.items() if now - answered.since > LINGER_S]
        return b"".join([self.cut(stream_id, ErrorCode.NO_ERROR) for stream_id in late])
