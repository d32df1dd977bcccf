"""The HTTP/1.1 server protocol: one object per client connection; reply bytes reach the socket here.

Made for many long streams: streamed replies write to the connection directly, connections and request times
are limited, slow clients are cut (:mod:`penstock.http.slow_clients`;
:mod:`penstock.generation.replies.streamed` limits the backlog of a stream), and errors have OpenAI's shape.
One request is parsed at a time: what a client sends behind it waits unparsed, and reading pauses.
"""

from __future__ import annotations

import logging
import socket
from asyncio import Protocol, get_running_loop
from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto
from typing import Any

from penstock.http.admission import too_many_connections
from penstock.http.eager import run_eagerly
from penstock.http.errors import ApiError
from penstock.http.http1.chunks import chunk
from penstock.http.http1.reply_framing import (
    CONTINUE,
    Framing,
    ReplyFraming,
    header_lines,
    local_reply,
    stream_head,
)
from penstock.http.http1.request_head import RequestHead
from penstock.http.http1.request_reader import RequestReader
from penstock.http.http1.tunnel import Tunnel
from penstock.http.http2.connection import Http2Connection
from penstock.http.http2.frames import PREFACE
from penstock.http.request import Application, HttpRequest
from penstock.http.server_state import LINGER_S, MAX_LINGER_BYTES, REFUSAL_S, ServerState, address
from penstock.http.sink import EVENT_STREAM, Headers, Listener, StreamKind
from penstock.http.slow_clients import MIN_BODY_RATE, SlowClientTimer, Verdict
from penstock.http.websocket.channel import Channel, ChannelUser
from penstock.http.write_target import WriteTarget

log = logging.getLogger(__name__)

HIGH_WATER_BYTES = 16 * 1024
"""Unsent bytes of a connection from which on its client counts as not reading."""
MAX_WAITING_BYTES = 16 * 1024
"""Unparsed bytes behind the request in progress from which on the connection is not read."""
MAX_UNREAD_BYTES = 64 * 1024
"""Bytes of a body that the application has not asked for from which on the connection is not read."""
MAX_DISCARDED_BYTES = 64 * 1024
"""Rest of a body that is read and discarded after an early reply, to keep the connection."""
GONE_CHECK_S = 0.05
"""Time for the answer of a closed socket to a probe."""


class ConnectionPhase(Enum):
    """What becomes of the bytes that come."""

    FIRST_BYTES = auto()
    """The bytes may still become the preface of HTTP/2."""
    SERVING = auto()
    """The bytes are requests."""
    DISCARDING = auto()
    """The bytes are discarded: the connection closes after the reply in progress."""
    LINGERING = auto()
    """The bytes are discarded until the client closes, and nothing else is left to do."""


class ServerProtocol(Protocol):
    """One connection. It is itself the :class:`penstock.http.sink.Sink` of the reply in progress.

    ``app`` is called for each request.
    """

    def __init__(self, app: Application, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._limits = state.limits

    # -- per connection

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._start = b""
        """First bytes that may become the preface of HTTP/2."""
        self._phase = ConnectionPhase.FIRST_BYTES
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() == "h2":
            self._speak_http2()
            return
        self._state.connections.add(self)
        self._reader = RequestReader(self._limits.max_header_bytes)
        self._request: HttpRequest | None = None
        """The request that is being answered."""
        self._framing = ReplyFraming()
        self._head = b""
        """The head of the reply in progress, until what follows is written: one write costs half of two."""
        self._tls = transport.get_extra_info("sslcontext") is not None
        self._socket = transport.get_extra_info("socket")
        self._write_target: WriteTarget | None = None
        if not (self._tls or self._socket is None):
            self._write_target = WriteTarget(descriptor=self._socket.fileno(), write_rest=transport.write)
        self._client = address(transport.get_extra_info("peername"))
        # Half of the backlog is for bytes written before the client counts as slow, half for later ones.
        transport.set_write_buffer_limits(min(HIGH_WATER_BYTES, self._limits.max_backlog // 2))
        self.timer = SlowClientTimer(self._state.clock())
        self.write_paused = False
        self._read_paused = False
        self._half_closed = False
        """The client sends nothing more, but may read."""
        self._continues = False
        """A callback to :meth:`_advance` is scheduled."""
        self._discarded = 0
        """Bytes that were discarded."""
        self._lingers_since = 0.0
        """When the phase LINGERING began."""
        self._held = 0
        """Bytes that the budget knows of."""
        self._listener: Listener | None = None
        self._refuse_at: float | None = None
        """When the client of a connection beyond the limit is told so, if it has not begun a request before;
        None: it is not beyond."""
        if excess := self._state.excess_connections:
            self._refuse_at = self._state.clock() + REFUSAL_S
            if excess > self._limits.max_lingering:
                self._refuse(too_many_connections())

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(self)
        self._state.lingering.discard(self)
        self._write_target = None  # the socket is about to be closed; another connection may get its number
        self.timer.on_close()
        self._reader.clear()
        self._abandon()
        self._request = None
        self._account()
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.on_disconnect()
        self._state.on_lost()

    def pause_writing(self) -> None:
        self.write_paused = True
        if self._listener is not None:
            self._listener.on_pause()

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._listener is not None:
            self._listener.on_resume()
        if self._request is not None:
            self._request.wake()
        else:
            self._advance()

    def data_received(self, data: bytes) -> None:
        if self._phase is ConnectionPhase.FIRST_BYTES:
            self._start += data
            if not self._choose_protocol():
                return
            data = self._start
            if self._refuse_at is not None:
                self._refuse(too_many_connections())
                return
        if self._phase is ConnectionPhase.SERVING:
            self._reader.receive(data)
            self._advance()
            return
        self._discarded += len(data)
        if self._discarded > MAX_LINGER_BYTES:
            self.transport.abort()

    def _choose_protocol(self) -> bool:
        """Whether the client speaks HTTP/1.1; until that is known, and if it speaks HTTP/2: False."""
        start = self._start
        if not (start.startswith(PREFACE) or PREFACE.startswith(start)):
            self._phase = ConnectionPhase.SERVING
            return True
        if len(start) < len(PREFACE):
            if self.timer.waiting_since is None:
                self.timer.on_request_begin(self._state.clock())
        else:
            self._state.connections.discard(self)
            self.timer.on_close()
            self._speak_http2()
        return False

    def _speak_http2(self) -> None:
        """Leave the transport to the protocol of HTTP/2."""
        connection = Http2Connection(self._app, self._state)
        self.transport.set_protocol(connection)
        connection.connection_made(self.transport)
        if self._start:
            connection.data_received(self._start)

    def eof_received(self) -> bool:
        """The client has closed the connection, or its sending side alone: both look the same. If its request
        is complete, the reply is written, as to those that wait behind it; what is written finds out whether
        its socket still exists.

        Returns whether the connection stays open. With TLS it cannot; and a reply of :meth:`begin` that has
        begun, into which nothing can be written to find out, is given up.
        """
        request = self._request
        if self._tls:
            return False
        if request is None and self._reader.body_complete and self._reader.waiting:
            # Requests whose turn has not come, if :meth:`_advance` is to be called.
            self._half_closed = self._continues or self.write_paused
            return self._half_closed
        if request is None or not request.body_complete:
            return False
        if request.events is not None:
            self.write(request.events.filler)
        elif request.started:
            return False
        elif self._framing.chunks:
            self.transport.write(CONTINUE)  # which every client of HTTP/1.1 skips (RFC 9110 §15.2)
        self._half_closed = True
        get_running_loop().call_later(GONE_CHECK_S, self._abort_if_gone)
        return True

    def _abort_if_gone(self) -> None:
        """End a half-closed connection whose client has answered a write with a reset."""
        if not self.transport.is_closing() and self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()

    def shutdown(self) -> None:
        """Close now if idle, else after the reply; the server calls it when it ends."""
        if self._request is None:
            self.transport.close()
        else:
            self._request.keep_alive = False

    def cut_if_slow(self, now: float, request_timeout_s: float, keep_alive_s: float) -> None:
        """Close or abort the connection if its client is too slow. The server's sweep calls it."""
        if self._phase is ConnectionPhase.LINGERING:
            if now - self._lingers_since > LINGER_S:
                self.transport.abort()
            return
        if self._refuse_at is not None and now > self._refuse_at:
            self._refuse(too_many_connections())
            return
        if self._half_closed:
            self._abort_if_gone()
        unread, request = self.unread(), self._request
        verdict = self.timer.check(
            now,
            request_timeout_s,
            keep_alive_s,
            reading=not self._read_paused,
            replying=request is not None and (request.streamed or not unread),
            unread=unread,
        )
        match verdict:
            case Verdict.LATE_HEAD:
                text = f"The request line and headers did not arrive within {request_timeout_s:g} s"
                self._refuse(ApiError(408, f"{text} (--header-timeout)."))
            case Verdict.STALLED_BODY:
                text = f"Nothing of the request body arrived for {request_timeout_s:g} s (--header-timeout)."
                self._refuse(ApiError(408, text))
            case Verdict.SLOW_BODY:
                text = f"The request body arrives with less than {MIN_BODY_RATE} bytes per second."
                self._refuse(ApiError(408, text))
            case Verdict.IDLE:
                self.transport.close()
            case Verdict.NOT_READING:
                self.transport.abort()

    # -- per request

    def _advance(self) -> None:
        """Take up the next request and its body, as far as they have come."""
        try:
            self._take_up()
        except ApiError as error:
            self._refuse(error)
        self._account()
        self._pause_or_resume()

    def _take_up(self) -> None:
        reader = self._reader
        if not reader.body_complete:
            self._take_up_body()
        if self._request is not None or not reader.body_complete or self.transport.is_closing():
            return
        if self.write_paused:  # the client has not read the replies to the requests before
            return
        head = reader.read_head()
        if head is None:
            if self._half_closed:
                self.transport.close()
            elif reader.waiting and self.timer.waiting_since is None:
                self.timer.on_request_begin(self._state.clock())
            return
        if head.length != 0:
            if self._state.budget.full:
                reader.clear()
                raise self._state.budget.refusal()
            if not reader.has_rest:
                self.timer.on_body_begin(self._state.clock())
        self._begin(head)

    def _take_up_body(self) -> None:
        rounds = self._state.chunk_rounds
        if self._reader.chunked and rounds.left <= 0:
            self._continue_later()
            return
        data, request = self._reader.read_body(), self._request
        self.timer.on_body(self._state.clock(), len(data))
        if self._reader.chunks:
            rounds.spend(self._reader.chunks)
        if request is not None:  # else it was answered already
            request.add_body(data)
            request.body_complete = self._reader.body_complete
            request.wake()
        if self._reader.body_complete:
            self.timer.on_request_complete()
            if request is None:
                self.timer.on_last_reply(self._state.clock())
        elif self._reader.has_more:
            self._continue_later()

    def _continue_later(self) -> None:
        if not self._continues:
            self._continues = True
            self._state.chunk_rounds.wait(self._continue)

    def _continue(self) -> None:
        self._continues = False
        if self._serves and not self.transport.is_closing():
            self._advance()

    def _begin(self, head: RequestHead) -> None:
        """Start the application for a request."""
        self._framing.on_request(head.version)
        self._request = request = HttpRequest(head, self, self._client)
        if self._reader.has_rest:
            request.add_body(self._reader.read_body())
            request.body_complete = True
            self.timer.on_request_complete()
        else:
            try:
                self._take_up_body()
            except ApiError as error:  # the application does not know of the request yet
                self._request = None
                self._reply_and_end(error)
                return
        run_eagerly(self._run(request), self._state.tasks)

    async def _run(self, request: HttpRequest) -> None:
        """Call the application. It may return before its reply ends if it has called :meth:`listen`."""
        try:
            await self._app(request)
        except Exception:
            log.exception("the application failed")
            if not (request.started or request.disconnected):
                self._reply_locally(ApiError(500, "The server failed to handle this request."))
            self.transport.close()
            return
        finally:
            if self._request is request:
                self.release()
        if not (request.complete or request.disconnected or self._listener is not None):
            log.error("the application has not completed a reply")
            self.transport.close()

    def on_body_wanted(self) -> None:
        """The application waits for more of the body."""
        request = self._request
        assert request is not None
        if request.expects_continue:
            request.expects_continue = False
            if not request.started:
                self.transport.write(CONTINUE)
        self._pause_or_resume()

    def _pause_or_resume(self) -> None:
        """Read on unless enough has come that nobody asks for yet."""
        request, waiting = self._request, self._reader.waiting
        if not self._serves:
            pause = False
        elif request is None:
            pause = (self._continues or self.write_paused) and waiting >= MAX_WAITING_BYTES
        elif request.body_complete:
            pause = waiting >= MAX_WAITING_BYTES
        else:
            pause = request.unread >= MAX_UNREAD_BYTES or self._continues
        if pause != self._read_paused and not self.transport.is_closing():
            self._read_paused = pause
            if pause:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    @property
    def _serves(self) -> bool:
        """Whether what comes are requests."""
        return self._phase is ConnectionPhase.SERVING or self._phase is ConnectionPhase.FIRST_BYTES

    # -- the bytes that it holds

    @property
    def receiving(self) -> bool:
        return self._request is None or not self._request.body_complete or self._reader.waiting > 0

    def on_over_budget(self) -> None:
        self._held = 0
        self._refuse(self._state.budget.refusal())
        self._account()

    def release(self, kept: int = 0) -> None:
        """The application has no use for the request's body any more, but for ``kept`` bytes."""
        if self._request is not None and self._request.body_size != kept:
            self._request.body_size = kept
            self._account()

    def _account(self) -> None:
        held = self._reader.waiting
        if self._request is not None:
            held += self._request.body_size
        if held != self._held:
            self._held = held
            self._state.budget.hold(self, held)

    # -- the end of the connection

    def _refuse(self, error: ApiError) -> None:
        """Answer what cannot be given to the application, and close. A request that is being answered gets
        its reply instead, as the last one; one that was answered gets no second reply. If the rest of a body
        does not come, the application answers."""
        request, answered = self._request, not self._reader.body_complete
        if self._serves:
            self._phase = ConnectionPhase.DISCARDING
        self._reader.clear()
        if request is not None:
            request.keep_alive = False
            if not (request.started or request.body_complete):
                request.fail(error)
            return
        if answered:
            self._linger()
        else:
            self._reply_and_end(error)

    def _reply_and_end(self, error: ApiError) -> None:
        self._state.on_refusal(error)
        self._reply_locally(error)
        self._linger()

    def _reply_locally(self, error: ApiError) -> None:
        self.transport.write(local_reply(error, self._state.date))

    def _linger(self) -> None:
        """Close once the client has closed, has read for a while, or is too late (:data:`LINGER_S`)."""
        if self._serves:
            self._phase = ConnectionPhase.DISCARDING
        self._reader.clear()
        lingering = self._state.lingering
        if self._half_closed or len(lingering) >= self._limits.max_lingering or self.transport.is_closing():
            self.transport.close()
            return
        lingering.add(self)
        self._pause_or_resume()
        self._phase, self._lingers_since = ConnectionPhase.LINGERING, self._state.clock()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    # -- the sink of a streamed reply: see Sink

    @property
    def write_target(self) -> WriteTarget | None:
        if not self._framing.chunks or self._head or self.transport.get_write_buffer_size():
            return None
        return self._write_target

    def listen(self, listener: Listener) -> None:
        if self.transport.is_closing():
            self._abandon()
            listener.on_disconnect()
            return
        self._listener = listener
        if self.write_paused:  # the client has not read the previous reply
            listener.on_pause()

    def send(self, data: bytes, *, last: bool, kind: StreamKind = EVENT_STREAM) -> None:
        request = self._request
        assert request is not None
        data = self._framing.events(data, last=last)
        if not request.started:
            request.events = kind
            request.status = 200
            self._framing.begin_events()
            data = self._head_from(stream_head(kind)) + data
        self.transport.write(data)
        if last:
            self._complete()

    def write(self, data: bytes) -> None:
        self.transport.write(chunk(data) if self._framing.chunks else data)

    def begin(self, status: int, headers: Headers) -> None:
        """Begin a reply; its head is sent with what follows: :meth:`write_body`, :meth:`finish`."""
        self._head = self._reply_head(status, headers)

    def _reply_head(self, status: int, headers: Headers) -> bytes:
        """The head of the reply in progress."""
        assert self._request is not None
        start = self._framing.begin(self._request.method, status, headers)
        return self._head_from(start, dated=b"date" in [name for name, _ in headers])

    def _head_from(self, start: bytes, *, dated: bool = False) -> bytes:
        """A reply's head that begins with ``start``; ``dated``: with a date header."""
        request = self._request
        assert request is not None
        request.started = True
        request.streamed = self._framing.body is Framing.CHUNKED
        if request.reply_headers:
            start += header_lines(request.reply_headers)
        ends = self._framing.body is Framing.UNTIL_CLOSE
        if ends or self._state.closes_after_reply or self._ends_after(request):
            request.keep_alive = False
        date = b"" if dated else b"date: %b\r\n" % self._state.date
        return self._framing.head(start, date, keep_alive=request.keep_alive)

    def _ends_after(self, request: HttpRequest) -> bool:
        """Whether the client can send no other request after this one."""
        if request.body_complete:
            return self._half_closed and not self._reader.waiting
        left = self._reader.body_left
        return left is None or left > MAX_DISCARDED_BYTES or request.expects_continue

    def reply(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole reply."""
        self.begin(status, headers)
        self._write_with_head(self._framing.part(body))
        self.finish()

    def write_body(self, data: bytes) -> None:
        """Write a non-empty part of the body; ignored on a closing connection."""
        if self.transport.is_closing():
            return
        if part := self._framing.part(data):
            self._write_with_head(part)

    def _write_with_head(self, data: bytes) -> None:
        """Write the head, if it was not, and ``data``."""
        if head := self._head:
            self._head = b""
            if len(data) > HIGH_WATER_BYTES:  # a copy costs more than a write
                self.transport.write(head)
            else:
                data = head + data
        if data:
            self.transport.write(data)

    @property
    def bytes_queued(self) -> int:
        return self.unread()

    @property
    def is_over(self) -> bool:
        return (self._phase is ConnectionPhase.LINGERING or self.transport.is_closing()) and not self.unread()

    def unread(self) -> int:
        size: int = self.transport.get_write_buffer_size()
        return size

    def upgrade(self, headers: Headers, use: Callable[[Channel], ChannelUser]) -> None:
        request = self._request
        assert request is not None
        request.status, request.started, request.complete = 101, True, True
        if self.transport.is_closing():
            return
        self._listener = self._request = None
        target = None
        if self._write_target is not None:
            target = replace(self._write_target, messages=True)
        tunnel = Tunnel(self.transport, self._state, target, write_paused=self.write_paused)
        start = b"HTTP/1.1 101 Switching Protocols\r\n" + header_lines((*headers, *request.reply_headers))
        self.transport.write(start + b"date: %b\r\n\r\n" % self._state.date)
        early = self._reader.take_rest()
        self._account()
        self.timer.on_close()
        self._state.connections.discard(self)
        tunnel.open(use)
        if early:
            tunnel.data_received(early)

    def finish(self) -> None:
        """End the body of a reply that :meth:`begin` started."""
        self._write_with_head(self._framing.end())
        self._complete()

    def _complete(self) -> None:
        request = self._request
        assert request is not None
        self._listener = self._request = None
        request.complete = True
        request.wake()
        if self.transport.is_closing():
            return
        if request.keep_alive:
            if request.body_complete:
                self.timer.on_last_reply(self._state.clock())
            if self._reader.waiting or self._read_paused or self._half_closed or not request.body_complete:
                # Later, as the next request may be answered at once, too, and the one behind it.
                if not self._continues:
                    self._continues = True
                    get_running_loop().call_soon(self._continue)
            elif self._held:
                self._account()
        elif not self._serves or self._reader.waiting or not request.body_complete:
            self._linger()
            self._account()
        else:
            self.transport.close()

    def cut(self) -> None:
        self._listener = None
        self._abandon()
        self.transport.abort()

    def _abandon(self) -> None:
        """Mark the request in progress as disconnected."""
        if self._request is not None:
            self._request.disconnected = True
            self._request.wake()
