"""One stream of an HTTP/2 connection: a request, and the sink of its reply."""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import IntEnum
from functools import lru_cache
from typing import Protocol

from penstock.http.errors import ApiError
from penstock.http.http2 import frames
from penstock.http.http2.core import Http2Core
from penstock.http.http2.faults import ErrorCode, StreamFault
from penstock.http.http2.header_blocks import encode_fields, encode_status
from penstock.http.http2.roles import STREAM_WINDOW
from penstock.http.http2.sender import MAX_FRAME, FrameSender
from penstock.http.http2.tunnel import StreamTunnel
from penstock.http.request import Application, HttpRequest
from penstock.http.server_state import ServerState
from penstock.http.sink import EVENT_STREAM, Headers, Listener, StreamKind
from penstock.http.slow_clients import MIN_BODY_RATE, SlowClientTimer, Verdict
from penstock.http.websocket.channel import Channel, ChannelUser
from penstock.http.write_target import WriteTarget

log = logging.getLogger(__name__)

SMALL_BODY = 16 * 1024
"""Complete bodies of this size are not counted: the application takes them at once."""
_OK = encode_status(200)
_EVENTS_HEAD = _OK + encode_fields(EVENT_STREAM.headers)
_CONTINUE = encode_status(100)
_PER_CONNECTION = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
)
"""Headers that HTTP/2 forbids (RFC 9113 §8.2.2); a relayed reply may have them."""


@lru_cache(maxsize=2)
def _date_field(date: bytes) -> bytes:
    return encode_fields([(b"date", date)])


class StreamPhase(IntEnum):
    """How far the reply has come::

        OPEN ◄──pause, resume──► PAUSED
          └──────────┬────────────┘
                  complete ──► ENDING ──sent──► CLOSED

    A stream that is reset, by either end, or whose connection is lost, is CLOSED at once.
    """

    OPEN = 0
    """The end of the reply is not handed over, and its client reads as far as is known."""
    PAUSED = 1
    """The reply was told to pause: bytes wait for a window or for the transport."""
    ENDING = 2
    """The end is handed over, and follows what is unsent."""
    CLOSED = 3


class StreamOwner(Protocol):
    """The connection of a server, as its streams see it."""

    app: Application
    state: ServerState
    sender: FrameSender
    core: Http2Core[Http2Stream]

    def end_stream(self, stream: Http2Stream) -> None:
        """END_STREAM was written."""
        ...

    def reset_stream(self, stream: Http2Stream, code: ErrorCode) -> None:
        """End the stream by RST_STREAM."""
        ...

    def on_run_end(self) -> None:
        """The application has returned for a request whose stream is closed."""
        ...

    def on_held(self, stream: Http2Stream) -> None:
        """The stream holds bytes from here on."""
        ...

    def on_sent(self, stream: Http2Stream) -> None:
        """The stream holds no bytes any more."""
        ...


class Http2Stream:
    """A request and its reply, as :class:`penstock.http.sink.Sink`, from HEADERS to the end of both.

    Calls of a reply that goes on after the end have no effect.
    """

    __slots__ = (
        "_bodyless",
        "_connection",
        "_listener",
        "_sender",
        "_sent",
        "_unsent",
        "_write_target",
        "body_left",
        "id",
        "phase",
        "progress_at",
        "queued",
        "receive_window",
        "request",
        "running",
        "slot",
        "timer",
        "tunnel",
    )

    def __init__(self, connection: StreamOwner, id: int, slot: int, body_left: int | None) -> None:
        """``slot``: in the flow windows. ``body_left``: content-length; None: it is not known."""
        self._connection = connection
        self._sender = connection.sender
        self.id = id
        self.slot = slot
        self.request: HttpRequest | None = None
        """None before it is set by the connection, and after :meth:`close`."""
        self.running = False
        """Whether the application is called and has not returned."""
        self.phase = StreamPhase.OPEN
        # the request
        self.receive_window = STREAM_WINDOW
        self.body_left = body_left
        self.timer: SlowClientTimer | None = None
        # the reply
        self._listener: Listener | None = None
        self._bodyless = False
        self._write_target: WriteTarget | None = None
        self._unsent: bytes = b""
        """Bytes of the body that wait for a window, or for the stream's turn; from ``_sent`` on."""
        self._sent = 0
        self.queued = False
        self.tunnel: StreamTunnel | None = None
        """Set once the stream is a WebSocket."""
        self.progress_at = 0.0
        """When bytes that waited were last sent."""

    @property
    def is_closed(self) -> bool:
        return self.phase is StreamPhase.CLOSED

    # -- the request: called by the connection

    def on_data(self, data: bytes, flow_size: int, now: float, *, last: bool) -> None:
        """A DATA frame. ``flow_size`` counts its padding. Raises StreamFault."""
        request = self.request
        assert request is not None
        if request.body_complete:
            raise StreamFault(self.id, ErrorCode.STREAM_CLOSED, "DATA after the end of a request")
        self.receive_window -= flow_size
        if self.receive_window < 0:
            raise StreamFault(self.id, ErrorCode.FLOW_CONTROL_ERROR, "DATA beyond the window of a stream")
        if self.body_left is not None:
            self.body_left -= len(data)
            if self.body_left < 0 or (last and self.body_left):
                raise StreamFault(self.id, ErrorCode.PROTOCOL_ERROR, "a body has not its content-length")
        if self.tunnel is not None:
            request.body_complete = last
            self.tunnel.on_data(data, last=last)
            return
        if self.timer is not None:
            self.timer.on_body(now, len(data))
        request.add_body(data)
        if last:
            request.body_complete = True
            self.timer = None
        if not last or request.body_size > SMALL_BODY:
            self._connection.state.budget.hold(self, request.body_size)
        request.wake()

    def close(self) -> None:
        """The stream has ended. The application, if it still runs, sees that its client has gone, unless its
        reply is complete."""
        self.phase = StreamPhase.CLOSED
        listener, self._listener = self._listener, None
        request, self.request = self.request, None  # breaks a reference cycle
        self._unsent = b""
        if request is not None:
            request.disconnected = True
            if request.body_size:
                self._connection.state.budget.hold(self, 0)
            request.wake()
        if listener is not None:
            listener.on_disconnect()

    async def run_application(self, request: HttpRequest) -> None:
        """Call the application. It may return before its reply ends if it has called :meth:`listen`."""
        self.running = True
        try:
            await self._connection.app(request)
        except Exception:
            log.exception("the application failed")
            if self.is_closed:
                return
            if request.started:
                self.reset(ErrorCode.INTERNAL_ERROR)
            else:
                self._reply_locally(ApiError(500, "The server failed to handle this request."))
            return
        finally:
            self.running = False
            if self.is_closed:
                self._connection.on_run_end()
            else:
                self.release()
        if not (request.complete or request.disconnected or self._listener is not None):
            log.error("the application has not completed a reply")
            self.reset(ErrorCode.INTERNAL_ERROR)

    def refuse(self, error: ApiError) -> None:
        """Answer what cannot be given to the application. If the rest of a body does not come, the
        application answers; a reply that has begun is broken off."""
        request = self.request
        if request is None or request.complete:
            return
        if request.started:
            self.reset(ErrorCode.CANCEL)
        elif self.running:
            request.fail(error)
        else:
            self._connection.state.on_refusal(error)
            self._reply_locally(error)

    def _reply_locally(self, error: ApiError) -> None:
        body = error.body()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *error.headers,
        ]
        self.reply(error.status, headers, body)

    def reset(self, code: ErrorCode) -> None:
        """End the stream by RST_STREAM."""
        if not self.is_closed:
            self._connection.reset_stream(self, code)

    # -- the sink, for its request: see Sink

    @property
    def write_paused(self) -> bool:
        return self.phase is StreamPhase.PAUSED

    def on_body_wanted(self) -> None:
        request = self.request
        if request is None:
            return
        if request.expects_continue:
            request.expects_continue = False
            if not request.started:
                self._sender.write(self._head(_CONTINUE))
        more = STREAM_WINDOW - self.receive_window
        if more >= STREAM_WINDOW // 2:
            self.receive_window = STREAM_WINDOW
            self._sender.write(frames.window_update(self.id, more))

    def _reply_head(self, status: int, headers: Headers) -> bytes:
        """The HEADERS frame of the reply. Replies to HEAD and with status 204 or 304 have no body."""
        request = self.request
        if request is None:
            return b""
        request.started = True
        self._bodyless = request.method == "HEAD" or status in (204, 304)
        fields = []
        dated = sized = False
        for name, value in headers:
            name = name.lower()
            if name in _PER_CONNECTION:
                continue
            dated = dated or name == b"date"
            sized = sized or name == b"content-length"
            fields.append((name, value.strip()))
        request.streamed = not (sized or self._bodyless)
        date = b"" if dated else _date_field(self._connection.state.date)
        added = encode_fields(request.reply_headers) if request.reply_headers else b""
        return self._head(encode_status(status) + encode_fields(fields) + added + date)

    def _head(self, block: bytes) -> bytes:
        """HEADERS of a reply, or of an interim one."""
        block = self._connection.core.settings.block_start + block
        return frames.header_frames(self.id, block, end_stream=False, max_frame_size=MAX_FRAME)

    def reply(self, status: int, headers: Headers, body: bytes) -> None:
        head = self._reply_head(status, headers)
        self._write(head, b"" if self._bodyless else body, last=True, urgent=False)

    # -- the sink, for what replies: see Sink

    @property
    def write_target(self) -> WriteTarget | None:
        if self._unsent or self.is_closed or self._sender.paused:
            return None
        if self._write_target is None:
            self._write_target = WriteTarget(window=self.slot, prefix=frames.data_prefix(self.id))
        return self._write_target

    def listen(self, listener: Listener) -> None:
        if self.is_closed:
            listener.on_disconnect()
            return
        self._listener = listener
        if self._sender.paused and self.phase is StreamPhase.OPEN:
            self.phase = StreamPhase.PAUSED
        if self.phase is StreamPhase.PAUSED:
            listener.on_pause()

    def release(self, kept: int = 0) -> None:
        request = self.request
        if request is not None and request.body_size != kept:
            request.body_size = kept
            self._connection.state.budget.hold(self, kept)

    def unread(self) -> int:
        return self.held

    def send(self, data: bytes, *, last: bool, kind: StreamKind = EVENT_STREAM) -> None:
        request = self.request
        if request is None:
            return
        head = b""
        if not request.started:
            request.started = request.streamed = True
            request.events = kind
            request.status = 200
            block = _EVENTS_HEAD if kind is EVENT_STREAM else _OK + encode_fields(kind.headers)
            block += _date_field(self._connection.state.date)
            if request.reply_headers:
                block += encode_fields(request.reply_headers)
            head = self._head(block)
        self._write(head, data, last=last, urgent=True)

    def write(self, data: bytes) -> None:
        self._write(b"", data, last=False, urgent=True)

    def begin(self, status: int, headers: Headers) -> None:
        self._write(self._reply_head(status, headers), b"", last=False, urgent=False)

    def write_body(self, data: bytes) -> None:
        request = self.request
        urgent = request is not None and request.streamed  # events, as far as can be told
        self._write(b"", b"" if self._bodyless else data, last=False, urgent=urgent)

    def finish(self) -> None:
        self._write(b"", b"", last=True, urgent=True)

    def upgrade(self, headers: Headers, use: Callable[[Channel], ChannelUser]) -> None:
        request = self.request
        if request is None:
            return
        request.status = 200
        self.begin(200, headers)
        request.complete = True
        early, self.timer = request.take_unread(), None
        self._connection.state.budget.hold(self, 0)
        self.tunnel = tunnel = StreamTunnel(self, self._connection.state)
        tunnel.user = use(tunnel)
        self.listen(tunnel)
        request.forget_headers()
        if early or request.body_complete:
            tunnel.on_data(early, last=request.body_complete)

    def cut(self) -> None:
        self._listener = None
        self.reset(ErrorCode.CANCEL)

    # -- writing

    def _write(self, head: bytes, data: bytes, *, last: bool, urgent: bool) -> None:
        """Write ``head``, HEADERS or nothing, and data, as far as it fits; the rest is held."""
        if self.phase >= StreamPhase.ENDING:
            return
        if last:
            self._complete()
        size, sender = len(data), self._sender
        if self._unsent:
            self._hold(data)
        elif not size:
            if last:
                head = _ended(head) if head else frames.frame(frames.DATA, frames.END_STREAM, self.id)
            if head:
                sender.write(head)
            if last:
                self._connection.end_stream(self)
        elif sender.take_window(self.slot, size, urgent=urgent):
            flags = frames.END_STREAM if last else 0
            sender.write(b"".join((head, frames.frame_header(size, frames.DATA, flags, self.id), data)))
            if last:
                self._connection.end_stream(self)
        else:
            if head:
                sender.write(head)
            self._hold(data)

    def _complete(self) -> None:
        """The end of the reply is handed over."""
        request = self.request
        assert request is not None
        self._listener = None
        self.phase = StreamPhase.ENDING
        request.complete = True
        request.wake()

    def _hold(self, data: bytes) -> None:
        if self._unsent:
            self._unsent = self._unsent[self._sent :] + data
        else:
            self._unsent = data
            self._connection.on_held(self)
        self._sent = 0
        self._sender.queue(self)
        if self._unsent:
            self.pause()

    @property
    def held(self) -> int:
        """Bytes that wait for a window, or for the stream's turn."""
        return len(self._unsent) - self._sent

    def take_frame(self, size: int) -> tuple[bytes, memoryview]:
        start = self._sent
        self._sent = end = start + size
        last = self.phase is StreamPhase.ENDING and end == len(self._unsent)
        self.progress_at = self._connection.core.now
        header = frames.frame_header(size, frames.DATA, frames.END_STREAM if last else 0, self.id)
        return header, memoryview(self._unsent)[start:end]

    def on_all_sent(self) -> None:
        self._unsent, self._sent = b"", 0
        self._connection.on_sent(self)
        if self.phase is StreamPhase.ENDING:
            self._connection.end_stream(self)
        elif not self._sender.paused:
            self.resume()

    def pause(self) -> None:
        """The client does not read."""
        if self.phase is StreamPhase.OPEN:
            self.phase = StreamPhase.PAUSED
            if self._listener is not None:
                self._listener.on_pause()

    def resume(self) -> None:
        """The client reads again."""
        if self._unsent or self.phase is not StreamPhase.PAUSED:
            return
        self.phase = StreamPhase.OPEN
        if self._listener is not None:
            self._listener.on_resume()
        if self.request is not None:
            self.request.wake()

    # -- the bytes that it holds, and the time that it takes

    @property
    def receiving(self) -> bool:
        return self.request is not None and not self.request.body_complete

    def on_over_budget(self) -> None:
        self.refuse(self._connection.state.budget.refusal())

    def check_body(self, now: float, timeout_s: float, keep_alive_s: float) -> None:
        """Refuse a body that comes too slowly; called once a second while it is incomplete."""
        if self.tunnel is not None:
            self.tunnel.user.check(now, timeout_s, keep_alive_s)
            return
        if self.timer is None:
            self.timer = SlowClientTimer(now)
            self.timer.on_body_begin(now)
            return
        verdict = self.timer.check(
            now, timeout_s, 0.0, reading=self.receive_window > 0, replying=True, unread=0
        )
        if verdict is Verdict.STALLED_BODY:
            text = f"Nothing of the request body arrived for {timeout_s:g} s (--header-timeout)."
            self.refuse(ApiError(408, text))
        elif verdict is Verdict.SLOW_BODY:
            text = f"The request body arrives with less than {MIN_BODY_RATE} bytes per second."
            self.refuse(ApiError(408, text))

    def check_held(self, now: float, timeout_s: float) -> None:
        """Cut a reply of which nothing is taken for too long. One that is streamed limits its own backlog."""
        request = self.request
        assert request is not None
        if (self.phase is StreamPhase.ENDING or not request.streamed) and now - self.progress_at > timeout_s:
            self.cut()


def _ended(head: bytes) -> bytes:
    """HEADERS with END_STREAM."""
    return b"%b%c%b" % (head[:4], head[4] | frames.END_STREAM, head[5:])
