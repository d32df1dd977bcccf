"""The sending half of a client's HTTP/2 connection: the bodies of requests, as windows allow, in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from penstock.http.http2.frames import (
    DATA,
    DEFAULT_FRAME_SIZE,
    DEFAULT_WINDOW,
    END_STREAM,
    MAX_WINDOW,
    frame_header,
)


class RequestStream(Protocol):
    """A stream of a client."""

    stream_id: int
    send_window: int
    """Bytes of the request's body that the server allows to send."""
    unsent: memoryview
    """What has come of the request's body and is not sent."""
    more: bool
    """Whether more of it follows."""

    def on_sent(self) -> None:
        """All that has come is sent."""
        ...


class RequestBodies:
    """The bodies that are not sent completely, and the send windows; a
    :class:`penstock.http.http2.core.SendingHalf`."""

    def __init__(self, write: Callable[[bytes], object], streams: Mapping[int, RequestStream]) -> None:
        """``streams``: all of the connection's, by id."""
        self.write = write
        self._streams = streams
        self._window = DEFAULT_WINDOW
        """Bytes that the server allows for all streams together."""
        self._paused = False
        """The transport holds enough."""
        self.data_bytes = 0
        """Bytes sent."""
        self.waiting: dict[int, RequestStream] = {}
        """Streams whose body is not sent completely, by id."""

    def add(self, stream: RequestStream, head: bytes, body: bytes, window: int) -> None:
        """Send ``head``, the frames of the request's header block, and as much of the body as possible.
        ``window``: what the server allows on a stream that opens."""
        stream.send_window = window
        stream.unsent = memoryview(body)
        if self.waiting or self._paused:  # in turns
            self.write(head)
            self.waiting[stream.stream_id] = stream
            self._send()
            return
        frames: list[bytes | memoryview] = [head]
        while stream.unsent and (piece := self._take_frame(stream)):
            frames += piece
        if stream.unsent:
            self.waiting[stream.stream_id] = stream
        self.write(b"".join(frames))

    def append(self, stream: RequestStream, data: bytes) -> None:
        """Send the next part of a body of which nothing is unsent; the last part may be empty."""
        if not data:
            self.write(frame_header(0, DATA, END_STREAM, stream.stream_id))
            return
        stream.unsent = memoryview(data)
        self.waiting[stream.stream_id] = stream
        self._send()

    def forget(self, stream: RequestStream) -> None:
        """The stream has ended."""
        stream.unsent = memoryview(b"")
        self.waiting.pop(stream.stream_id, None)

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._send()

    # -- windows

    def change_initial_window(self, difference: int) -> bool:
        """Change the windows of all streams, as SETTINGS want. Return whether none exceeds the maximum."""
        for stream in self._streams.values():
            stream.send_window += difference
            if stream.send_window > MAX_WINDOW:
                return False
        self._send()
        return True

    def widen(self, stream: RequestStream | None, increment: int) -> bool:
        """Count what the server allows on one stream, or on all together, and send what has waited for it.
        Return whether the window stays below its maximum."""
        if stream is None:
            self._window += increment
            window, waits = self._window, True
        else:
            stream.send_window += increment
            window, waits = stream.send_window, bool(stream.unsent)
        if window > MAX_WINDOW:
            return False
        if waits:
            self._send()
        return True

    # -- frames

    def _send(self) -> None:
        """Send one frame of each body in turn, until windows or the transport stop all of them."""
        while self.waiting and not self._paused and self._window > 0:
            frames: list[bytes | memoryview] = []
            for stream in list(self.waiting.values()):
                frames += self._take_frame(stream)
                if not stream.unsent:
                    del self.waiting[stream.stream_id]
                    stream.on_sent()
            if not frames:
                return
            self.write(b"".join(frames))

    def _take_frame(self, stream: RequestStream) -> tuple[bytes, memoryview] | tuple[()]:
        """Return the next frame of a body, no larger than servers have to take; none without a window."""
        unsent = stream.unsent
        size = min(len(unsent), DEFAULT_FRAME_SIZE, stream.send_window, self._window)
        if size <= 0:
            return ()
        self._window -= size
        self.data_bytes += size
        stream.send_window -= size
        stream.unsent = unsent[size:]
        flags = 0 if stream.unsent or stream.more else END_STREAM
        return frame_header(size, DATA, flags, stream.stream_id), unsent[:size]
