"""One request to a model server and its reply, as a stream of an HTTP/2 connection.

Its window for the reply is opened again as the client takes the reply: a slow client stops its own stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.gateway.upstream.exchange import (
    PIECE_BYTES,
    Failure,
    Headers,
    ReplyReceiver,
    UpstreamRequest,
)
from penstock.gateway.upstream.reply_scanner import PlainEventRelay, PlainEventShape
from penstock.http.http1.reply_reader import MAX_OVERHEAD_BYTES
from penstock.http.http2.faults import ErrorCode, StreamFault
from penstock.http.http2.header_blocks import MALFORMED, Field

if TYPE_CHECKING:
    from penstock.gateway.upstream.http2_connection import Http2UpstreamConnection

WINDOW = 256 << 10
"""Receive window of a stream: bytes that are held for a slow client at most."""
REFILL_BELOW = WINDOW // 2
"""Receive window below which it is opened again."""

_CONNECTION_HEADERS = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
)
"""Headers that no message of HTTP/2 has (RFC 9113 §8.2.2)."""


class Http2Exchange:
    """A stream. The connection gives it what comes, and reads and writes its windows."""

    __slots__ = (
        "_bodyless",
        "_connection",
        "_drained",
        "_left",
        "_overhead",
        "_paused",
        "_receiver",
        "answered",
        "deliver",
        "ended",
        "has_head",
        "more",
        "send_window",
        "stream_id",
        "unsent",
        "window",
    )

    def __init__(self, connection: Http2UpstreamConnection) -> None:
        self.stream_id = 0
        """0: the request is not sent."""
        self.deliver: Callable[[bytes, float], None] | None = None
        """Takes content. None: only :meth:`take_content` may, as there are conditions on the content."""
        self.window = WINDOW
        """Bytes that the server may send."""
        self.send_window = 0
        """Bytes of the request's body that the server allows to send."""
        self.unsent = memoryview(b"")
        """What has come of the request's body and is not sent."""
        self.more = False
        """Whether more of the body follows that."""
        self._drained: asyncio.Future[None] | None = None
        """Done when all that has come is sent, or the exchange has ended; None: nobody waits."""
        self.answered = False
        """Anything of the reply has come."""
        self.has_head = False
        self.ended = False
        """Whether the exchange counts no longer as a stream of its connection."""
        self._connection = connection
        self._receiver: ReplyReceiver | None = None
        self._bodyless = False
        self._paused = False
        self._left: int | None = None
        """Bytes of content that are missing, if the reply says how many it has."""
        self._overhead = 0
        """Bytes of interim replies."""

    # -- called by the relay

    def send(self, request: UpstreamRequest, receiver: ReplyReceiver) -> None:
        self._receiver = receiver
        self._bodyless = request.method == b"HEAD"
        self._connection.start(self, request)

    async def send_part(self, data: bytes) -> None:
        while self.unsent and self._receiver is not None:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained
        if self.more and self._receiver is not None:
            self.more = bool(data)
            self._connection.send_part(self, data)

    def on_sent(self) -> None:
        """All that has come of the body is sent."""
        waiter, self._drained = self._drained, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def abort(self) -> None:
        self._forget()
        self._connection.end(self, ErrorCode.CANCEL)

    def pause(self, receiver: ReplyReceiver) -> None:
        if self._receiver is receiver:
            self._paused = True

    def resume(self, receiver: ReplyReceiver) -> None:
        if self._receiver is receiver:
            self._paused = False
            self.refill()

    def enter_fast_path(self, shape: PlainEventShape, relay: PlainEventRelay, size: int) -> int:
        allowed = self.window - REFILL_BELOW
        if allowed <= 0 or self._paused or self._left is not None or self.ended:
            return 0
        self._connection.plain_events = relay
        self._connection.plain_shapes[self.stream_id] = shape
        self.window += size  # until the fast path is left
        return allowed + size

    def leave_fast_path(self, relayed: int) -> None:
        self.window -= relayed
        self._connection.plain_shapes.pop(self.stream_id, None)
        self.refill()  # the server may have nothing left to send anything by

    # -- called by the connection

    def refill(self) -> None:
        """Open the window if it is small, unless the client is slow."""
        if self.window < REFILL_BELOW and not self._paused and self._receiver is not None:
            missing, self.window = WINDOW - self.window, WINDOW
            self._connection.open_window(self, missing)

    def take_fields(self, fields: list[Field], size: int, *, last: bool) -> None:
        """A header block of ``size`` bytes: an interim reply, the head, or trailers. Raises StreamFault."""
        self.answered = True
        if self.has_head:
            if not last or any(name[:1] in (b":", MALFORMED) for name, _ in fields):
                raise self._fault("its trailers are malformed")
            self._finish()
            return
        status, headers = self._read_head(fields)
        if status < 200:
            self._overhead += size
            if last or status == 101 or self._overhead > MAX_OVERHEAD_BYTES:
                raise self._fault(f"an interim reply {status} that no reply follows")
            return
        self._take_head(status, headers, last=last)

    def _read_head(self, fields: list[Field]) -> tuple[int, Headers]:
        name, status = fields[0] if fields else (MALFORMED, b"")
        if name != b":status" or len(status) != 3 or not status.isdigit() or status < b"100":
            raise self._fault("its reply has no status")
        headers = fields[1:]
        for name, _ in headers:
            if name[:1] in (b":", MALFORMED) or name in _CONNECTION_HEADERS:
                raise self._fault("the headers of its reply are malformed")
        return int(status), headers

    def _take_head(self, status: int, headers: Headers, *, last: bool) -> None:
        receiver = self._receiver
        assert receiver is not None
        self.has_head = True
        self._bodyless = self._bodyless or status in (204, 304)
        lengths = [value for name, value in headers if name == b"content-length"]
        if lengths and not self._bodyless:
            length = lengths.pop()
            if lengths or not length.isdigit() or len(length) > 18:
                raise self._fault("its content-length is malformed")
            self._left = int(length)
        receiver.on_head(status, headers)
        if self._receiver is None:  # it has given up the reply
            return
        if last:
            self._finish()
        elif self._left is None and not self._bodyless:
            self.deliver = receiver.on_body

    def take_content(self, data: bytes, now: float) -> None:
        """The next content. Raises StreamFault."""
        if not self.has_head:
            raise self._fault("content before its head")
        if self._left is not None:
            self._left -= len(data)
            if self._left < 0:
                raise self._fault("more content than its content-length")
        if self._receiver is not None and not self._bodyless and data:
            self._receiver.on_body(data, now)

    def take_end(self) -> None:
        """The server has ended the stream. Raises StreamFault."""
        if not self.has_head:
            raise self._fault("the end before its head")
        self._finish()

    def _finish(self) -> None:
        if self._left:
            raise self._fault("less content than its content-length")
        receiver = self._receiver
        self._forget()
        self._connection.end(self, ErrorCode.CANCEL if self.unsent or self.more else None)
        if receiver is not None:
            receiver.on_end()

    def break_off(self, reason: str, failure: Failure) -> None:
        """The stream or the connection has ended before the reply was complete."""
        receiver = self._receiver
        self._forget()
        if receiver is not None:
            receiver.on_broken(reason, failure)

    def _forget(self) -> None:
        self._receiver = self.deliver = None
        self.on_sent()

    def _fault(self, reason: str) -> StreamFault:
        return StreamFault(self.stream_id, ErrorCode.PROTOCOL_ERROR, reason)


assert PIECE_BYTES < REFILL_BELOW
