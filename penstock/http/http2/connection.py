"""The HTTP/2 server protocol: one object per client connection, which many requests share (RFC 9113).

It reads frames and keeps the states of the streams (:mod:`penstock.http.http2.stream`); the sender writes
(:mod:`penstock.http.http2.sender`). What breaks the protocol ends the connection with GOAWAY, or the stream
with RST_STREAM; a request that is refused gets a reply. Floods are bounded by
:mod:`penstock.http.http2.rates`.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from asyncio import Protocol, get_running_loop
from typing import Any

from penstock.http.admission import too_many_connections, unavailable
from penstock.http.eager import run_eagerly
from penstock.http.errors import ApiError
from penstock.http.http1.request_head import MAX_HEADERS, RequestHead
from penstock.http.http2 import frames
from penstock.http.http2.block_assembler import Block, BlockAssembler, check_dependency
from penstock.http.http2.closed_streams import ClosedStreams
from penstock.http.http2.ending import Ending
from penstock.http.http2.faults import ConnectionFault, ErrorCode, StreamFault
from penstock.http.http2.frames import FrameScanner
from penstock.http.http2.header_blocks import HeaderDecoder, HeaderListTooLarge
from penstock.http.http2.peer_settings import PeerSettings
from penstock.http.http2.rates import (
    BYTES_PER_CONTROL,
    HEADER_BYTES_PER_CONTROL,
    SETTINGS_BYTES_PER_CONTROL,
    WINDOWS_PER_CONTROL,
    control_limit,
    reset_limit,
)
from penstock.http.http2.request_fields import MalformedRequest, parse_fields, refused_head
from penstock.http.http2.sender import FrameSender
from penstock.http.http2.stream import STREAM_WINDOW, Http2Stream
from penstock.http.request import Application, HttpRequest
from penstock.http.server_state import ServerState, address

log = logging.getLogger(__name__)

MAX_STREAMS = 2048
"""Requests of one connection at a time, with those whose client has gone and whose work has not ended."""
CONNECTION_WINDOW = 1024 * 1024
"""Bytes of all bodies that a client may send before WINDOW_UPDATE; it gets that as soon as they are read."""
FRAMES_PER_PIECE = 32
"""Frames between two looks at the clock."""
TURN_S = 0.002
"""Time for the frames of one connection in a turn of the event loop."""
SMALL_DATA = 64
"""Smaller DATA frames within a body count as frames that carry nothing."""
LOST_PER_TURN = 64
"""Streams of a lost connection that end in one turn of the event loop, so others' events are not late."""
UNSENT_IN_KERNEL = 128 * 1024
"""Bytes that the kernel takes beyond what it can send: rows wait behind no more than that."""
_TCP_NOTSENT_LOWAT: int | None = getattr(socket, "TCP_NOTSENT_LOWAT", None)

_ANNOUNCED = {
    frames.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
    frames.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
}


class Http2Connection(Protocol):
    """One connection. ``app`` is called for each request."""

    def __init__(self, app: Application, state: ServerState) -> None:
        self.app = app
        self.state = state

    # -- per connection

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.now = now = self.state.clock()
        """Of the latest read or sweep."""
        limits = self.state.limits
        self.sender = FrameSender(transport, self.state.windows, self._open_streams)
        self.streams: dict[int, Http2Stream] = {}
        self._scanner = FrameScanner()
        self._decoder = HeaderDecoder()
        self._max_header_bytes = limits.max_header_bytes
        self.settings = PeerSettings()
        self._completed = 0
        """Replies that were sent to their end."""
        self._control = control_limit(now)
        self._resets = reset_limit(now)
        self._client = address(transport.get_extra_info("peername"))
        _limit_kernel_buffer(transport.get_extra_info("socket"))
        self._prefaced = 0
        """Bytes of the preface that have come."""
        self._has_settings = False
        """Whether the client's first frame has come."""
        self._blocks = BlockAssembler(limits.max_header_bytes)
        self.last_id = 0
        """The latest stream of the client."""
        self._closed = ClosedStreams()
        self._abandoned = 0
        """Requests whose stream is closed and whose application runs on."""
        self._fresh: list[Http2Stream] = []
        """Requests of this read whose bodies have not come."""
        self._receiving: set[Http2Stream] = set()
        """Streams whose request is incomplete."""
        self._holding: set[Http2Stream] = set()
        """Streams with bytes that wait."""
        self._receive_window = CONNECTION_WINDOW
        self._read_on = False
        """Whether the next turn goes on with what was read."""
        self._held = 0
        """Bytes that the budget knows of."""
        self._partial_since: float | None = None
        """Since when the preface, a frame or a header block is incomplete."""
        self.idle_since = now
        self._ending = Ending(self)
        self._is_over = False
        self._losing = False
        """Whether streams of an ended connection are still to be closed."""
        self._lost = False
        self.state.connections.add(self)
        self.sender.write(
            frames.settings_frame({**_ANNOUNCED, frames.MAX_HEADER_LIST_SIZE: limits.max_header_bytes})
            + frames.window_update(0, CONNECTION_WINDOW - frames.DEFAULT_WINDOW)
        )
        excess = self.state.excess_connections
        self._is_excess = excess > 0
        """It is beyond the limit of connections: its requests are refused, and it ends."""
        if excess > limits.max_lingering:
            self._refuse(too_many_connections())

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self.state.connections.discard(self)
        self.state.lingering.discard(self)
        self.end_all()
        self.state.on_lost()

    def pause_writing(self) -> None:
        self.sender.on_congested()

    def resume_writing(self) -> None:
        self.sender.on_drained()

    def eof_received(self) -> bool:
        """The client sends nothing more: it is gone."""
        return False

    def _open_streams(self) -> list[Any]:
        return list(self.streams.values())

    def _spend_control(self, count: int = 1) -> None:
        """A frame that carries nothing, or hardly anything, has come, or what takes as long as ``count``."""
        self._control.spend(self.now, self.sender.data_bytes // BYTES_PER_CONTROL, count)

    @property
    def bytes_queued(self) -> int:
        size: int = self.transport.get_write_buffer_size()
        return size + sum([stream.held for stream in self._holding])

    @property
    def is_over(self) -> bool:
        return (self._is_over or self.transport.is_closing()) and not self.bytes_queued

    # -- reading

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            self._ending.discard(len(data))
            return
        self._scanner.receive(data)
        if not self._read_on:
            self._read()

    def _read(self) -> None:
        """Handle the frames that have come, for a limited time."""
        self._read_on = False
        if self._is_over:
            return
        self.now = now = self.state.clock()
        self.sender.begin_batch()
        progress = False
        try:
            if self._prefaced < len(frames.PREFACE):
                self._read_preface()
            while taken := self._scanner.take(FRAMES_PER_PIECE):
                progress = True
                for frame in taken:
                    self._handle(*frame)
                self._start_fresh()
                if len(taken) == FRAMES_PER_PIECE and self.state.clock() > now + TURN_S:
                    self._read_on = True
                    break
            if (self.state.ending or self._is_excess) and not self.streams:
                self._ending.on_server_ends()
            self._after_read(progress=progress)
        except ConnectionFault as fault:
            self._ending.fail(fault.code, fault.reason)
        except Exception:
            log.exception("an HTTP/2 connection failed")
            self._ending.fail(ErrorCode.INTERNAL_ERROR, "the server failed")
        finally:
            self.sender.end_batch()

    def _read_preface(self) -> None:
        start = self._scanner.take_bytes(len(frames.PREFACE) - self._prefaced)
        if start != frames.PREFACE[self._prefaced :][: len(start)]:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "this is not the preface of HTTP/2")
        self._prefaced += len(start)

    def _after_read(self, *, progress: bool) -> None:
        """``progress``: frames have come."""
        if self._read_on:
            self.transport.pause_reading()
            get_running_loop().call_soon(self._continue)
        partial = self._scanner.waiting + self._blocks.waiting
        if not partial and self._prefaced == len(frames.PREFACE):
            self._partial_since = None
        elif self._partial_since is None or (progress and not self._blocks.waiting):
            self._partial_since = self.now
        if partial != self._held:
            self._held = partial
            self.state.budget.hold(self, partial)

    def _continue(self) -> None:
        if not (self._lost or self.transport.is_closing()):
            self.transport.resume_reading()
        self._read()

    def _handle(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._is_over:
            return
        unfinished = self._blocks.stream_id
        if unfinished and (kind != frames.CONTINUATION or stream_id != unfinished):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a header block is interrupted by another frame")
        if not self._has_settings:
            if kind != frames.SETTINGS or flags & frames.ACK:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
            self._has_settings = True
        try:
            if kind == frames.DATA:
                self._on_data(flags, stream_id, payload)
            elif kind == frames.HEADERS:
                self._on_block(self._blocks.on_headers(flags, stream_id, payload))
            elif kind == frames.WINDOW_UPDATE:
                self._on_window_update(stream_id, frames.unpack_long(payload, "WINDOW_UPDATE"))
            elif kind == frames.RST_STREAM:
                self._on_rst_stream(stream_id, payload)
            else:
                self._spend_control()
                self._on_control(kind, flags, stream_id, payload)
        except StreamFault as fault:
            self._resets.spend(self.now, self._completed)
            log.debug("stream %d: %s", fault.stream_id, fault.reason)
            stream = self.streams.get(fault.stream_id)
            if stream is None:
                self.sender.write(self._closed.cut(fault.stream_id, fault.code))
            else:
                self.reset_stream(stream, fault.code)

    def _on_control(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == frames.SETTINGS:
            self._on_settings(flags, stream_id, payload)
        elif kind == frames.PING:
            if stream_id:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PING on a stream")
            if len(payload) != 8:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "the length of PING is not 8")
            if not flags & frames.ACK:
                self.sender.write(frames.ping(payload, ack=True))
            else:
                self._ending.on_ping_ack(payload)
        elif kind == frames.CONTINUATION:
            self._on_block(self._blocks.on_continuation(flags, stream_id, payload))
        elif kind == frames.PRIORITY:
            if not stream_id:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PRIORITY without a stream")
            if len(payload) != 5:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "the length of PRIORITY is not 5")
            check_dependency(stream_id, payload)
        elif kind == frames.GOAWAY:
            if stream_id:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "GOAWAY on a stream")
            frames.unpack_goaway(payload)
        elif kind == frames.PUSH_PROMISE:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a client cannot push")

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")
        if flags & frames.ACK:
            if payload:
                raise ConnectionFault(
                    ErrorCode.FRAME_SIZE_ERROR, "an acknowledgement of SETTINGS has settings"
                )
            return
        before = self.settings.initial_window
        self.settings.apply(payload)
        difference = self.settings.initial_window - before
        windows = len(self.streams) // WINDOWS_PER_CONTROL if difference else 0
        self._spend_control(windows + len(payload) // SETTINGS_BYTES_PER_CONTROL)
        if difference and not self.sender.change_initial_window(difference):
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "SETTINGS raise a window above 2^31-1")
        self.sender.write(frames.SETTINGS_ACK)

    def _on_window_update(self, stream_id: int, increment: int) -> None:
        self._spend_control()
        increment &= frames.STREAM_BITS
        stream = self.streams.get(stream_id)
        if stream is None and stream_id:
            self._check_not_idle(stream_id, "WINDOW_UPDATE")
            return
        if not increment:
            if not stream_id:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
            raise StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
        if not self.sender.widen(None if stream is None else stream.slot, increment):
            text = "WINDOW_UPDATE beyond 2^31-1"
            if not stream_id:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, text)
            raise StreamFault(stream_id, ErrorCode.FLOW_CONTROL_ERROR, text)
        if stream is None:
            self.sender.pump()
        elif stream.held:
            self.sender.queue(stream)

    def _on_rst_stream(self, stream_id: int, payload: bytes) -> None:
        frames.unpack_long(payload, "RST_STREAM")
        self._check_not_idle(stream_id, "RST_STREAM")
        stream = self.streams.get(stream_id)
        if stream is None:
            self._closed.on_rst_stream(stream_id)
            self._spend_control()
            return
        self._resets.spend(self.now, self._completed)
        del self.streams[stream_id]
        self._close(stream)
        self._after_stream()

    def _check_not_idle(self, stream_id: int, name: str) -> None:
        if not stream_id or stream_id > self.last_id or not stream_id & 1:
            text = f"{name} on stream {stream_id}, which the client has not opened"
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, text)

    # -- requests

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        size = len(payload)
        self._check_not_idle(stream_id, "DATA")
        self._receive_window -= size
        if self._receive_window < 0:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "DATA beyond the connection's window")
        if self._receive_window < CONNECTION_WINDOW // 2:
            self.sender.write(frames.window_update(0, CONNECTION_WINDOW - self._receive_window))
            self._receive_window = CONNECTION_WINDOW
        data = frames.without_padding(flags, payload)
        last = bool(flags & frames.END_STREAM)
        if len(data) < SMALL_DATA and not last:
            self._spend_control()
        stream = self.streams.get(stream_id)
        if stream is None:
            if not self._ending.is_unserved(stream_id) and (
                sent := self._closed.on_data(stream_id, size, last=last)
            ):
                self.sender.write(sent)
            return
        stream.on_data(data, size, self.now, last=last)
        if last:
            self._receiving.discard(stream)

    def _on_block(self, complete: Block | None) -> None:
        """A header block: of a request, or of trailers; None: it is not complete yet."""
        if complete is None:
            return
        flags, stream_id, block = complete
        if len(block) >= HEADER_BYTES_PER_CONTROL:
            self._spend_control(len(block) // HEADER_BYTES_PER_CONTROL)
        too_large = False
        try:
            fields = self._decoder.decode(block, self._max_header_bytes, MAX_HEADERS)
        except HeaderListTooLarge:
            fields, too_large = [], True
        last = bool(flags & frames.END_STREAM)
        if stream_id <= self.last_id:
            self._on_trailers(stream_id, fields, last=last)
            return
        self.last_id = stream_id
        if self._ending.is_unserved(stream_id):
            return
        if len(self.streams) + self._abandoned + self._closed.unfinished >= MAX_STREAMS:
            raise StreamFault(stream_id, ErrorCode.REFUSED_STREAM, "too many streams")
        try:
            if too_large:
                raise _too_large(self._max_header_bytes)
            if self._is_excess:
                raise too_many_connections()
            if self.state.http2_streams >= self.state.limits.max_connections:
                raise unavailable("Too many requests to this server at a time.", "too_many_connections")
            head = parse_fields(fields, complete=last)
            if head.length != 0 and self.state.budget.full:
                raise self.state.budget.refusal()
        except MalformedRequest as malformed:
            raise StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR, str(malformed)) from None
        except ApiError as error:
            method = "HEAD" if (b":method", b"HEAD") in fields else "GET"
            stream = self._open(stream_id, refused_head(method), last=last)
            stream.refuse(error)
            return
        self._begin(stream_id, head, last=last)

    def _on_trailers(self, stream_id: int, fields: list[tuple[bytes, bytes]], *, last: bool) -> None:
        """Trailers are dropped."""
        stream = self.streams.get(stream_id)
        if stream is None:
            if self._ending.is_unserved(stream_id) or self._closed.on_trailers(stream_id, last=last):
                return
            was_open = self._closed.was_open(stream_id)
            code = ErrorCode.STREAM_CLOSED if was_open else ErrorCode.PROTOCOL_ERROR
            raise ConnectionFault(code, f"HEADERS on stream {stream_id}, which is closed")
        request = stream.request
        assert request is not None
        if request.body_complete:
            raise StreamFault(stream_id, ErrorCode.STREAM_CLOSED, "HEADERS after the end of a request")
        if not last:
            raise StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR, "HEADERS within a body")
        if any(not name or name[0] == 58 for name, _ in fields):
            raise StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR, "trailers with malformed or pseudo fields")
        stream.on_data(b"", 0, self.now, last=True)
        self._receiving.discard(stream)

    def _begin(self, stream_id: int, head: RequestHead, *, last: bool) -> None:
        stream = self._open(stream_id, head, last=last)
        if last:
            self._start(stream)
        else:
            self._fresh.append(stream)

    def _open(self, stream_id: int, head: RequestHead, *, last: bool) -> Http2Stream:
        slot = self.state.windows.add_stream(self.sender.slot, self.settings.initial_window)
        stream = Http2Stream(self, stream_id, slot, head.length)
        stream.request = HttpRequest(head, stream, self._client)
        self.streams[stream_id] = stream
        self.state.http2_streams += 1
        if last:
            stream.request.body_complete = True
        else:
            self._receiving.add(stream)
        return stream

    def _start_fresh(self) -> None:
        """Start the applications of requests whose bodies may have come in the same read."""
        while self._fresh:
            fresh, self._fresh = self._fresh, []
            for stream in fresh:
                if not stream.closed:
                    self._start(stream)

    def _start(self, stream: Http2Stream) -> None:
        request = stream.request
        assert request is not None
        run_eagerly(stream.run(request), self.state.tasks)

    # -- the ends of streams

    def end_stream(self, stream: Http2Stream) -> None:
        """END_STREAM was written."""
        request = stream.request
        del self.streams[stream.id]
        if request is not None and not request.body_complete:
            self._closed.add_answered(stream.id, stream.receive_window, self.now)
        self._completed += 1
        self._close(stream)
        self._after_stream()

    def reset_stream(self, stream: Http2Stream, code: ErrorCode) -> None:
        del self.streams[stream.id]
        self.sender.write(self._closed.cut(stream.id, code))
        self._close(stream)
        self._after_stream()

    def _close(self, stream: Http2Stream) -> None:
        self._receiving.discard(stream)
        self._holding.discard(stream)
        self._closed.add(stream.id)
        self.state.http2_streams -= 1
        if stream.running:
            self._abandoned += 1
        stream.close()
        self.state.windows.remove_stream(stream.slot)

    def _after_stream(self) -> None:
        if not self.streams:
            self.idle_since = self.state.clock()
            self._ending.on_last_stream()

    def on_run_end(self) -> None:
        """The application has returned for a request whose stream is closed."""
        self._abandoned -= 1

    def on_held(self, stream: Http2Stream) -> None:
        stream.progress_at = self.now
        self._holding.add(stream)

    def on_sent(self, stream: Http2Stream) -> None:
        self._holding.discard(stream)

    # -- the bytes that it holds: partial frames and header blocks

    @property
    def receiving(self) -> bool:
        return self._blocks.waiting > 0

    def on_over_budget(self) -> None:
        self._held = 0
        self._refuse(self.state.budget.refusal())

    # -- the end of the connection

    def _refuse(self, error: ApiError) -> None:
        """End the connection for want of room."""
        self.state.on_refusal(error)
        self._ending.fail(ErrorCode.ENHANCE_YOUR_CALM, error.message)

    def shutdown(self) -> None:
        self._ending.drain()

    def end_all(self) -> None:
        """Nothing is read or written any more."""
        self._is_over = True
        self.sender.close()
        self._forget_input()
        if not self._losing:
            self._lose_some()

    def _forget_input(self) -> None:
        self._scanner.clear()
        self._blocks.clear()
        self._partial_since = None
        self._fresh.clear()
        if self._held:
            self._held = 0
            self.state.budget.hold(self, 0)

    def _lose_some(self) -> None:
        """Close streams, some in each turn."""
        streams = self.streams
        for _ in range(min(len(streams), LOST_PER_TURN)):
            try:
                self._close(streams.popitem()[1])
            except Exception:
                log.exception("the end of a stream failed")
        self._losing = bool(streams)
        if streams:
            get_running_loop().call_soon(self._lose_some)
        elif self._lost:
            self.state.windows.remove_connection(self.sender.slot)
            self._ending.forget()

    def cut_if_slow(self, now: float, request_timeout_s: float, keep_alive_s: float) -> None:
        self.now = now
        if self._is_over:
            self._ending.check(now)
            return
        if self.state.ending or self._is_excess:
            self._ending.on_server_ends()
        for stream in list(self._receiving):
            stream.check_body(now, request_timeout_s)
        if resets := self._closed.sweep(now):
            self.sender.write(resets)
        for stream in list(self._holding):
            stream.check_held(now, keep_alive_s)
        if self.sender.is_stuck(now, keep_alive_s):
            self.transport.abort()
            return
        if self._partial_since is not None and now - self._partial_since > request_timeout_s:
            self._ending.fail(ErrorCode.PROTOCOL_ERROR, "a frame or header block did not arrive in time")
        elif not self.streams and now - self.idle_since > keep_alive_s:
            self._ending.drain()


def _too_large(limit: int) -> ApiError:
    return ApiError(
        431,
        f"The request has more than {MAX_HEADERS} headers, or they are larger than the {limit} bytes allowed "
        "by --max-header-bytes.",
    )


def _limit_kernel_buffer(tcp: Any) -> None:
    if tcp is not None and _TCP_NOTSENT_LOWAT is not None:
        with contextlib.suppress(OSError):  # a Unix socket
            tcp.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, UNSENT_IN_KERNEL)
