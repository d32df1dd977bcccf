"""The HTTP/2 server protocol: one object per client connection, which many requests share (RFC 9113).

It reads frames for the core (:mod:`penstock.http.http2.core`) and keeps the streams
(:mod:`penstock.http.http2.stream`); the sender writes (:mod:`penstock.http.http2.sender`). What breaks the
protocol ends the connection with GOAWAY, or the stream with RST_STREAM; a request that is refused gets a
reply. Floods are bounded by :mod:`penstock.http.http2.rates`.
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
from penstock.http.http2.closed_streams import ClosedStreams
from penstock.http.http2.core import Http2Core
from penstock.http.http2.ending import Ending, EndingPhase
from penstock.http.http2.faults import ConnectionFault, ErrorCode, StreamFault
from penstock.http.http2.frames import FrameScanner
from penstock.http.http2.header_blocks import Field
from penstock.http.http2.rates import reset_limit
from penstock.http.http2.request_fields import MalformedRequest, parse_fields, refused_head
from penstock.http.http2.roles import MAX_STREAMS, server_role
from penstock.http.http2.sender import FrameSender
from penstock.http.http2.stream import Http2Stream
from penstock.http.request import Application, HttpRequest
from penstock.http.server_state import ServerState, address

log = logging.getLogger(__name__)

FRAMES_PER_PIECE = 32
"""Frames between two looks at the clock."""
TURN_S = 0.002
"""Time for the frames of one connection in a turn of the event loop."""
GOAWAY_DELAY_S = 1.0
"""Maximum time between the two GOAWAY frames of a connection that ends (RFC 9113 §6.8)."""
IDLE_S = 1.0
"""A client that has asked for nothing for this long, or longer, has read the replies before, and a new one
has nothing to ask."""
LOST_PER_TURN = 64
"""Streams of a lost connection that end in one turn of the event loop, so others' events are not late."""
UNSENT_IN_KERNEL = 128 * 1024
"""Bytes that the kernel takes beyond what it can send: rows wait behind no more than that."""
_TCP_NOTSENT_LOWAT: int | None = getattr(socket, "TCP_NOTSENT_LOWAT", None)


class Http2Connection(Protocol):
    """One connection. ``app`` is called for each request."""

    def __init__(self, app: Application, state: ServerState) -> None:
        self.app = app
        self.state = state

    # -- per connection

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        now, limits = self.state.clock(), self.state.limits
        self.streams: dict[int, Http2Stream] = {}
        self.sender = FrameSender(transport, self.state.windows, self.streams)
        role = server_role(limits.max_header_bytes)
        self.core = Http2Core[Http2Stream](role, self.streams, self.sender, self, now)
        self._scanner = FrameScanner()
        self._completed = 0
        """Replies that were sent to their end."""
        self._resets = reset_limit(now)
        self._client = address(transport.get_extra_info("peername"))
        _limit_kernel_buffer(transport.get_extra_info("socket"))
        self._prefaced = 0
        """Bytes of the preface that have come."""
        self._closed = ClosedStreams()
        self._abandoned = 0
        """Requests whose stream is closed and whose application runs on."""
        self._fresh: list[tuple[Http2Stream, HttpRequest]] = []
        """Requests of this read whose bodies have not come."""
        self._receiving: set[Http2Stream] = set()
        """Streams whose request is incomplete."""
        self._holding: set[Http2Stream] = set()
        """Streams with bytes that wait."""
        self._read_on = False
        """Whether the next turn goes on with what was read."""
        self._held = 0
        """Bytes that the budget knows of."""
        self._partial_since: float | None = None
        """Since when the preface, a frame or a header block is incomplete."""
        self.idle_since = now
        self._ending = Ending()
        self._losing = False
        """Whether streams of an ended connection are still to be closed."""
        self._lost = False
        self.state.connections.add(self)
        self.sender.write(role.hello)
        excess = self.state.excess_connections
        self._is_excess = excess > 0
        """Whether the connection is beyond the limit of connections: its requests are refused, and it
        ends."""
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

    @property
    def bytes_queued(self) -> int:
        size: int = self.transport.get_write_buffer_size()
        return size + sum([stream.held for stream in self._holding])

    @property
    def is_over(self) -> bool:
        return (self.core.is_over or self.transport.is_closing()) and not self.bytes_queued

    # -- reading

    def data_received(self, data: bytes) -> None:
        if self.core.is_over:
            if self._ending.discard(len(data)):
                self.transport.abort()
            return
        self._scanner.receive(data)
        if not self._read_on:
            self._read()

    def _read(self) -> None:
        """Handle the frames that have come, for a limited time."""
        self._read_on = False
        core = self.core
        if core.is_over:
            return
        core.now = now = self.state.clock()
        self.sender.begin_batch()
        progress = False
        try:
            if self._prefaced < len(frames.PREFACE):
                self._read_preface()
            while taken := self._scanner.take_frames(FRAMES_PER_PIECE):
                progress = True
                for frame in taken:
                    core.handle(*frame)
                self._start_fresh()
                if len(taken) == FRAMES_PER_PIECE and self.state.clock() > now + TURN_S:
                    self._read_on = True
                    break
            if (self.state.ending or self._is_excess) and not self.streams:
                self._drain_at_end()
            self._after_read(progress=progress)
        except ConnectionFault as fault:
            self._fail(fault.code, fault.reason)
        except Exception:
            log.exception("an HTTP/2 connection failed")
            self._fail(ErrorCode.INTERNAL_ERROR, "the server failed")
        finally:
            self._start_fresh()
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
        block_bytes = self.core.blocks.waiting
        partial = self._scanner.waiting + block_bytes
        if not partial and self._prefaced == len(frames.PREFACE):
            self._partial_since = None
        elif self._partial_since is None or (progress and not block_bytes):
            self._partial_since = self.core.now
        if partial != self._held:
            self._held = partial
            self.state.budget.hold(self, partial)

    def _continue(self) -> None:
        if not (self._lost or self.transport.is_closing()):
            self.transport.resume_reading()
        self._read()

    # -- what the core tells: see ConnectionEvents

    def on_settings(self) -> None:
        """The windows of the streams follow; nothing else waits for them."""

    def on_goaway(self, last_id: int, code: int, debug: bytes) -> None:
        """The client opens no further streams, which it may leave at any time."""

    def on_ping_ack(self, payload: bytes) -> None:
        if self._ending.is_understood(payload):
            self._say_last()

    def on_stream_fault(self, fault: StreamFault) -> None:
        self._resets.spend(self.core.now, self._completed)
        log.debug("stream %d: %s", fault.stream_id, fault.reason)
        stream = self.streams.get(fault.stream_id)
        if stream is None:
            self.sender.write(self._closed.cut(fault.stream_id, fault.code))
        else:
            self.reset_stream(stream, fault.code)

    def on_reset(self, stream_id: int, stream: Http2Stream | None, code: int) -> None:
        if stream is None:
            self._closed.on_rst_stream(stream_id)
            return
        self._resets.spend(self.core.now, self._completed)
        del self.streams[stream_id]
        self._close(stream)
        self._after_stream()

    def on_data(
        self, stream_id: int, stream: Http2Stream | None, content: bytes, size: int, *, last: bool
    ) -> None:
        if stream is None:
            if not self._ending.is_unserved(stream_id) and (
                sent := self._closed.on_data(stream_id, size, last=last)
            ):
                self.sender.write(sent)
            return
        stream.on_data(content, size, self.core.now, last=last)
        if last:
            self._receiving.discard(stream)

    def on_headers(self, stream_id: int, fields: list[Field] | None, size: int, *, last: bool) -> None:
        """A header block: of a request, or of trailers."""
        if stream_id <= self.core.last_id:
            self._on_trailers(stream_id, fields or [], last=last)
            return
        self.core.last_id = stream_id
        if self._ending.is_unserved(stream_id):
            return
        if len(self.streams) + self._abandoned + self._closed.unfinished >= MAX_STREAMS:
            raise StreamFault(stream_id, ErrorCode.REFUSED_STREAM, "too many streams")
        try:
            if fields is None:
                raise _too_large(self.state.limits.max_header_bytes)
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
            method = "HEAD" if (b":method", b"HEAD") in (fields or ()) else "GET"
            stream = self._open(stream_id, refused_head(method), last=last)
            stream.refuse(error)
            return
        self._begin(stream_id, head, last=last)

    # -- requests

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
        stream.on_data(b"", 0, self.core.now, last=True)
        self._receiving.discard(stream)

    def _begin(self, stream_id: int, head: RequestHead, *, last: bool) -> None:
        stream = self._open(stream_id, head, last=last)
        request = stream.request
        assert request is not None
        if last:
            run_eagerly(stream.run_application(request), self.state.tasks)
        else:
            self._fresh.append((stream, request))

    def _open(self, stream_id: int, head: RequestHead, *, last: bool) -> Http2Stream:
        slot = self.state.windows.add_stream(self.sender.slot, self.core.settings.initial_window)
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
        """Start the applications of requests whose bodies may have come in the same read. One whose stream is
        closed already learns at its body that its client has gone: it counts and logs the request."""
        while self._fresh:
            fresh, self._fresh = self._fresh, []
            for stream, request in fresh:
                if request.complete:  # it was refused
                    continue
                if stream.is_closed:
                    self._abandoned += 1
                run_eagerly(stream.run_application(request), self.state.tasks)

    # -- the ends of streams

    def end_stream(self, stream: Http2Stream) -> None:
        """END_STREAM was written."""
        request = stream.request
        del self.streams[stream.id]
        if request is not None and not request.body_complete:
            self._closed.add_answered(stream.id, stream.receive_window, self.core.now)
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
            if self._ending.phase is EndingPhase.LAST:
                self._linger()

    def on_run_end(self) -> None:
        """The application has returned for a request whose stream is closed."""
        self._abandoned -= 1

    def on_held(self, stream: Http2Stream) -> None:
        stream.progress_at = self.core.now
        self._holding.add(stream)

    def on_sent(self, stream: Http2Stream) -> None:
        self._holding.discard(stream)

    # -- the bytes that it holds: partial frames and header blocks

    @property
    def receiving(self) -> bool:
        return self.core.blocks.waiting > 0

    def on_over_budget(self) -> None:
        self._held = 0
        self._refuse(self.state.budget.refusal())

    # -- the end of the connection

    def _refuse(self, error: ApiError) -> None:
        """End the connection for want of room."""
        self.state.on_refusal(error)
        self._fail(ErrorCode.ENHANCE_YOUR_CALM, error.message)

    def shutdown(self) -> None:
        """Close after the replies in progress, and those of requests on their way."""
        if self._ending.phase is not EndingPhase.SERVING:
            return
        for stream in list(self._receiving):
            if stream.tunnel is not None:
                stream.tunnel.user.shutdown()
        if not self.streams and self._was_busy:
            self._say_last()  # it lingers
            return
        self.sender.write(self._ending.warn())
        get_running_loop().call_later(GOAWAY_DELAY_S, self._say_last)

    def _drain_at_end(self) -> None:
        """Drain once the first request is answered, or does not come: the server tells new clients why it
        does not serve them."""
        if self.core.last_id or not self._was_busy:
            self.shutdown()

    @property
    def _was_busy(self) -> bool:
        """Whether the connection is new, or had a stream a moment ago."""
        return self.state.clock() - self.idle_since < IDLE_S

    def _say_last(self) -> None:
        """The client knows that the connection ends: serve what was received, and nothing after it."""
        if self._ending.phase >= EndingPhase.LAST:
            return
        self.sender.write(self._ending.say_last(self.core.last_id))
        if self.streams:
            return
        if self._was_busy:
            self._linger()
        else:
            self.sender.flush()
            self.transport.close()

    def _fail(self, code: ErrorCode, reason: str) -> None:
        """The client broke the protocol, or takes too much: end all its streams."""
        if self._ending.phase >= EndingPhase.LINGERING:
            return
        log.debug("connection ended: %s: %s", code.name, reason)
        self.sender.write(frames.goaway(self.core.last_id, code, reason))
        self._linger(faulty=True)

    def _linger(self, *, faulty: bool = False) -> None:
        """Close once the client has closed, or is too late: closing with unread bytes would destroy what it
        has not read. With TLS, which has no end of one direction, it may have read all replies and wait for
        us; a ``faulty`` one is not waited for."""
        self._ending.linger(self.core.now)
        self.sender.flush()
        self.end_all()
        lingering, transport = self.state.lingering, self.transport
        half = transport.can_write_eof()
        if transport.is_closing():
            return
        if len(lingering) < self.state.limits.max_lingering and (half or not faulty):
            lingering.add(self)
            if half:
                transport.write_eof()
        else:
            transport.close()

    def end_all(self) -> None:
        """Nothing is read or written any more."""
        self.core.end()
        self.sender.close()
        self._forget_input()
        if not self._losing:
            self._lose_some()

    def _forget_input(self) -> None:
        self._scanner.clear()
        self._partial_since = None
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
            self._ending.lose()

    def cut_if_slow(self, now: float, request_timeout_s: float, keep_alive_s: float) -> None:
        self.core.now = now
        if self.core.is_over:
            if self._ending.is_late(now):
                self.transport.abort()
            return
        if self.state.ending or self._is_excess:
            self._drain_at_end()
        for stream in list(self._receiving):
            stream.check_body(now, request_timeout_s, keep_alive_s)
        if resets := self._closed.sweep(now):
            self.sender.write(resets)
        for stream in list(self._holding):
            stream.check_held(now, keep_alive_s)
        if self.sender.is_stuck(now, keep_alive_s):
            self.transport.abort()
            return
        if self._partial_since is not None and now - self._partial_since > request_timeout_s:
            self._fail(ErrorCode.PROTOCOL_ERROR, "a frame or header block did not arrive in time")
        elif not self.streams and now - self.idle_since > keep_alive_s:
            self.shutdown()


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
