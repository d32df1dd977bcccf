"""Sends the bodies of requests over one HTTP/2 connection, as its windows allow, in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.gateway.upstream.http2_exchange import Http2Exchange
from penstock.http.http2.faults import ConnectionFault, ErrorCode, StreamFault
from penstock.http.http2.frames import (
    DATA,
    DEFAULT_FRAME_SIZE,
    DEFAULT_WINDOW,
    END_STREAM,
    MAX_WINDOW,
    frame_header,
)


class RequestBodies:
    """The bodies that are not sent completely, and the send windows of connection and streams."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._window = DEFAULT_WINDOW
        """Bytes that the server allows for all streams together."""
        self._initial_window = DEFAULT_WINDOW
        self._paused = False
        """The transport holds enough."""
        self.sent = 0
        """Bytes sent."""
        self._waiting: dict[int, Http2Exchange] = {}
        """Streams whose body is not sent completely, by id."""

    def add(self, exchange: Http2Exchange, head: bytes, body: bytes) -> None:
        """Send ``head``, the frames of the request's header block, and as much of the body as possible."""
        exchange.send_window = self._initial_window
        exchange.unsent = memoryview(body)
        if self._waiting or self._paused:  # in turns
            self._write(head)
            self._waiting[exchange.stream_id] = exchange
            self._send()
            return
        frames: list[bytes | memoryview] = [head]
        while exchange.unsent and (piece := self._take_frame(exchange)):
            frames += piece
        if exchange.unsent:
            self._waiting[exchange.stream_id] = exchange
        self._write(b"".join(frames))

    def forget(self, exchange: Http2Exchange) -> None:
        """The stream has ended."""
        exchange.unsent = memoryview(b"")
        self._waiting.pop(exchange.stream_id, None)

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._send()

    # -- windows

    def on_initial_window(self, size: int, exchanges: Iterable[Http2Exchange]) -> None:
        """The server has changed the window of ``exchanges``, all open streams. Raises ConnectionFault."""
        if size > MAX_WINDOW:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, f"an initial window of {size} bytes")
        change, self._initial_window = size - self._initial_window, size
        for exchange in exchanges:
            exchange.send_window += change
            if exchange.send_window > MAX_WINDOW:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "a stream's window overflows")
        self._send()

    def on_window(self, increment: int) -> None:
        """The server allows more bytes for all streams together. Raises ConnectionFault."""
        if not increment:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")
        self._window += increment
        if self._window > MAX_WINDOW:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "the connection's window overflows")
        self._send()

    def on_stream_window(self, exchange: Http2Exchange, increment: int) -> None:
        """The server allows more bytes for one stream. Raises StreamFault."""
        if not increment:
            raise StreamFault(exchange.stream_id, ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")
        exchange.send_window += increment
        if exchange.send_window > MAX_WINDOW:
            raise StreamFault(exchange.stream_id, ErrorCode.FLOW_CONTROL_ERROR, "its window overflows")
        if exchange.unsent:
            self._send()

    # -- frames

    def _send(self) -> None:
        """Send one frame of each body in turn, until windows or the transport stop all of them."""
        while self._waiting and not self._paused and self._window > 0:
            frames: list[bytes | memoryview] = []
            for exchange in list(self._waiting.values()):
                frames += self._take_frame(exchange)
                if not exchange.unsent:
                    del self._waiting[exchange.stream_id]
            if not frames:
                return
            self._write(b"".join(frames))

    def _take_frame(self, exchange: Http2Exchange) -> tuple[bytes, memoryview] | tuple[()]:
        """The next frame of a body, no larger than servers have to take; none if a window is used up."""
        unsent = exchange.unsent
        size = min(len(unsent), DEFAULT_FRAME_SIZE, exchange.send_window, self._window)
        if size <= 0:
            return ()
        self._window -= size
        self.sent += size
        exchange.send_window -= size
        exchange.unsent = unsent[size:]
        flags = 0 if exchange.unsent else END_STREAM
        return frame_header(size, DATA, flags, exchange.stream_id), unsent[:size]
