"""A connection to a model server over HTTP/2: many requests at a time, replies as callbacks.

One read brings a step's events of many streams; each is handed to its receiver without a parser or task in
between. Other frames go to the core that servers have as well (:mod:`penstock.http.http2.core`), which bounds
what the server may cause; one read takes no longer than a turn of the event loop allows.
"""

from __future__ import annotations

import asyncio
import enum
import math
import time
from typing import TYPE_CHECKING, cast

from penstock.gateway.upstream.exchange import (
    IDLE_CLOSE_S,
    IDLE_S,
    PIECE_BYTES,
    TURN_S,
    Failure,
    UpstreamError,
    UpstreamRequest,
)
from penstock.gateway.upstream.http2_exchange import REFILL_BELOW, WINDOW, Http2Exchange
from penstock.gateway.upstream.reply_scanner import PlainEventRelay, ReplyScanner
from penstock.http.http2 import frames as h2
from penstock.http.http2.core import Http2Core
from penstock.http.http2.faults import ConnectionFault, ErrorCode, StreamFault, name_of
from penstock.http.http2.header_blocks import Field, encode_fields
from penstock.http.http2.request_bodies import RequestBodies
from penstock.http.http2.roles import client_role

if TYPE_CHECKING:
    from penstock.gateway.upstream.connection_pool import ConnectionPool

CONNECTION_WINDOW = 16 << 20
"""Receive window of a connection. It is opened again for all that comes, as streams have windows of their
own: a slow client does not stop the streams of others."""
MAX_WINDOW_CHANGES = 100
"""Changes of the windows of all streams that a server may make at once, and a tenth of them per second."""
MAX_UNREAD_BYTES = 4 << 20
"""Bytes that wait for a server that does not read from which on the connection is given up."""
BROKEN_PER_TURN = 64
"""Streams of a lost connection that are told so in one turn of the event loop."""
REFUSED_S = 1.0
"""Time for which a connection takes no stream after the server has refused one."""
CLOSE_S = 1.0
"""Time for a server to read the last frames of a connection."""
LAST_STREAM_ID = 2**31 - 1
SILENT_TICKS = 4
"""Ticks of silence after which a connection is lost; half of them after a PING."""

_ROLE = client_role(receive_window=CONNECTION_WINDOW, stream_window=WINDOW, window_changes=MAX_WINDOW_CHANGES)
_PING = b"penstock"


class NotHttp2Error(UpstreamError):
    """The server answers something else than HTTP/2, or nothing."""


class ConnectionState(enum.Enum):
    CONNECTING = enum.auto()
    """The server has not sent its SETTINGS."""
    OPEN = enum.auto()
    RETIRING = enum.auto()
    """The connection takes no further streams, and ends with its last one."""
    CLOSED = enum.auto()


class Http2UpstreamConnection(asyncio.Protocol):
    """One connection. Streams are opened with :meth:`open_exchange` and send their request later."""

    def __init__(self, owner: ConnectionPool, *, scheme: bytes, authority: bytes, silence_s: float) -> None:
        """``silence_s``: after this time without anything from the server its streams fail."""
        self._owner = owner
        self._origin = encode_fields([(b":scheme", scheme), (b":authority", authority)])
        self._tick_s = min(silence_s / SILENT_TICKS, IDLE_S)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._out: list[bytes] = []
        """Frames that are written at the end of this iteration of the event loop."""
        self._streams: dict[int, Http2Exchange] = {}
        self._bodies = RequestBodies(self._write, self._streams)
        self.core = Http2Core[Http2Exchange](_ROLE, self._streams, self._bodies, self, self._loop.time())
        self.ready: asyncio.Future[None] = self._loop.create_future()
        """Done with the server's SETTINGS. Raises NotHttp2Error."""
        self._state = ConnectionState.CONNECTING
        self._scanner = ReplyScanner()
        self.plain_shapes = self._scanner.plain_shapes
        """Streams whose plain events go to ``plain_events``, by stream id."""
        self.plain_events: PlainEventRelay | None = None
        self.active = 0
        """Streams that were taken and have not ended."""
        self._large: tuple[Http2Exchange, bytes, bool] | None = None
        """The rest of a large DATA frame, and whether it ends its stream."""
        self._frames: list[h2.Frame] = []
        """Frames that are left for the next turn; the transport does not read while there are any."""
        self._write_paused = False
        self._refused_until = 0.0
        """Until when it takes no stream, as the server has refused one."""
        self._silent_ticks = 0
        self._timer: asyncio.TimerHandle | None = None
        self._idle_since = 0.0
        self._unheard_since = -math.inf
        """When a stream was sent while no other was open; -inf: the server has said something since."""
        self._used = False
        """Whether the connection has carried a reply."""
        self._waits_for_turn = False
        self._lost = ""
        """Why the streams that are left break; empty: they do not."""
        self._goaway = ""
        """The error that the server has given as the reason."""

    # -- the pool

    @property
    def has_room(self) -> bool:
        """Whether it takes another stream."""
        return (
            self._state is ConnectionState.OPEN
            and self.active < self.core.settings.max_streams
            and not self._write_paused
            and self.core.last_id < LAST_STREAM_ID - 2
            and (not self._refused_until or self._loop.time() >= self._refused_until)
        )

    def open_exchange(self) -> Http2Exchange:
        """A stream, which counts from now on."""
        self.active += 1
        return Http2Exchange(self)

    def abort(self) -> None:
        """Close immediately."""
        self._transport.abort()

    def retire(self) -> None:
        """Take no further streams, and close after the last one."""
        if self._state in (ConnectionState.CONNECTING, ConnectionState.OPEN):
            self._state = ConnectionState.RETIRING
            self._owner.on_http2_closed(self)
        if not self.active:
            self._close(ErrorCode.NO_ERROR)

    def _close(self, code: ErrorCode, reason: str = "") -> None:
        if self._state is ConnectionState.CLOSED:
            return
        self._state = ConnectionState.CLOSED
        self.core.end()
        self._owner.on_http2_closed(self)
        self._write(h2.goaway(0, code, reason))
        self._flush()
        self._transport.close()
        self._loop.call_later(CLOSE_S, self._transport.abort)  # the server may not read

    def _write(self, frames: bytes) -> None:
        """Write at the end of this iteration of the event loop: the requests of one are one write."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(frames)

    def _flush(self) -> None:
        out = b"".join(self._out)
        self._out.clear()
        if not out or self._transport.is_closing():
            return
        self._transport.write(out)
        if self._write_paused and self._transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self._lost = "the server does not read"
            self._transport.abort()

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(_ROLE.hello)

    def pause_writing(self) -> None:
        self._write_paused = True
        self._bodies.pause()

    def resume_writing(self) -> None:
        self._write_paused = False
        self._bodies.resume()

    def data_received(self, data: bytes) -> None:
        self._silent_ticks, self._unheard_since = 0, -math.inf
        if self.core.is_over:
            return
        self._scanner.receive(data)
        if not self._waits_for_turn:
            self._process()

    def connection_lost(self, exc: Exception | None) -> None:
        self._state = ConnectionState.CLOSED
        self._owner.on_http2_closed(self)
        if self._timer is not None:
            self._timer.cancel()
        self._give_up_hello("the connection was closed before the server's SETTINGS")
        reason = str(exc) if exc else "the connection was closed before the reply was complete"
        self._lost = self._lost or reason
        if not self._waits_for_turn:
            self._break_streams()

    # -- reading

    def _process(self) -> None:
        """Handle what has come, as far as this turn of the event loop allows."""
        started, core = time.perf_counter(), self.core
        core.now = self._loop.time()
        try:
            late = self._handle_frames(started, core.now)
        except ConnectionFault as fault:
            self._fail(fault)
            return
        if core.receive_window < CONNECTION_WINDOW // 2:
            core.refill()
        if late:
            self._wait_for_turn()
        elif self._lost:
            self._break_streams()

    def _handle_frames(self, started: float, now: float) -> bool:
        """Return whether frames are left for the next turn. Raises ConnectionFault."""
        frames = self._frames
        while True:
            slots: list[int] = []
            if not (frames or self._large):
                events: list[bytes] = []
                texts: list[bytes] = []
                frames = self._scanner.take_events(slots, events, texts)
                if slots:
                    assert self.plain_events is not None  # there are shapes
                    self.core.receive_window -= sum(map(len, events))
                    self.plain_events.relay_events(slots, events, texts, now)
            if frames or self._large:
                self._frames = frames = self._handle(frames, started, now)
            elif not slots:
                return False
            if frames or time.perf_counter() - started > TURN_S:
                return True

    def _handle(self, batch: list[h2.Frame], started: float, now: float) -> list[h2.Frame]:
        """Handle frames in order. Return those for which no time is left. Raises ConnectionFault."""
        if self._large and self._deliver_large(started, now):
            return batch
        find, handle = self._streams.get, self.core.handle
        received, check = 0, PIECE_BYTES
        for index, (kind, flags, stream_id, payload) in enumerate(batch):
            if not kind and not flags and (exchange := find(stream_id)) is not None:
                size = len(payload)
                deliver = exchange.deliver
                if deliver is not None and 0 < size <= PIECE_BYTES and exchange.window >= REFILL_BELOW:
                    exchange.window -= size
                    received += size
                    deliver(payload, now)
                    if received < check:
                        continue
                    check = received + PIECE_BYTES
                    if time.perf_counter() - started <= TURN_S:
                        continue
                    self.core.receive_window -= received
                    return batch[index + 1 :]
            handle(kind, flags, stream_id, payload)
            if self._large and self._deliver_large(started, now):
                self.core.receive_window -= received
                return batch[index + 1 :]
        self.core.receive_window -= received
        return []

    def _deliver_large(self, started: float, now: float) -> bool:
        """Deliver a large DATA frame in pieces. Return whether no time is left."""
        while self._large:
            exchange, content, last = self._large
            piece, rest = content[:PIECE_BYTES], content[PIECE_BYTES:]
            self._large = (exchange, rest, last) if rest and not exchange.ended else None
            try:
                self._deliver(exchange, piece, now, last=last and not rest)
            except StreamFault as fault:
                self._large = None
                self.on_stream_fault(fault)
            if time.perf_counter() - started > TURN_S:
                return True
        return False

    def _deliver(self, exchange: Http2Exchange, content: bytes, now: float, *, last: bool) -> None:
        """Raises StreamFault."""
        if exchange.ended:
            return
        exchange.take_content(content, now)
        if last:
            exchange.take_end()
        else:
            exchange.refill()

    def _wait_for_turn(self) -> None:
        """Continue in the next turn of the event loop, after other connections."""
        self._waits_for_turn = True
        if not self._transport.is_closing():
            self._transport.pause_reading()
        self._loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._waits_for_turn = False
        self._process()
        if not (self._waits_for_turn or self._transport.is_closing()):
            self._transport.resume_reading()

    # -- what the core tells: see ConnectionEvents

    def on_data(
        self, stream_id: int, stream: Http2Exchange | None, content: bytes, size: int, *, last: bool
    ) -> None:
        if stream is None:
            return
        stream.window -= size
        if stream.window < 0:
            raise StreamFault(stream_id, ErrorCode.FLOW_CONTROL_ERROR, "more content than its window")
        if len(content) > PIECE_BYTES:
            self._large = stream, content, last
        else:
            self._deliver(stream, content, self.core.now, last=last)

    def on_headers(self, stream_id: int, fields: list[Field] | None, size: int, *, last: bool) -> None:
        exchange = self._streams.get(stream_id)
        if exchange is None:
            self.core.check_opened(stream_id, "HEADERS")
            self.core.spend_control()
            return
        if fields is None:
            text = f"its headers are more than {_ROLE.max_header_bytes} bytes or {_ROLE.max_headers}"
            raise StreamFault(stream_id, ErrorCode.CANCEL, text)
        self._used = True
        exchange.take_fields(fields, size + h2.HEADER_BYTES, last=last)

    def on_reset(self, stream_id: int, stream: Http2Exchange | None, code: int) -> None:
        if stream is None:
            return
        failure = Failure.SERVER if code == ErrorCode.INTERNAL_ERROR else Failure.NETWORK
        if code in (ErrorCode.REFUSED_STREAM, ErrorCode.HTTP_1_1_REQUIRED) and not stream.answered:
            failure = Failure.UNPROCESSED
            if code == ErrorCode.REFUSED_STREAM:
                self._refused_until = self._loop.time() + REFUSED_S
            else:
                self._owner.on_http1_required()
        self._break(stream_id, None, f"the server reset the stream: {name_of(code)}", failure)

    def on_stream_fault(self, fault: StreamFault) -> None:
        self._break(fault.stream_id, fault.code, f"it violated HTTP/2: {fault.reason}", Failure.NETWORK)

    def on_settings(self) -> None:
        if self._state is ConnectionState.CONNECTING:
            self._state = ConnectionState.OPEN
            self._idle_since = self._loop.time()
            self._timer = self._loop.call_later(self._tick_s, self._tick)
            self.ready.set_result(None)

    def on_goaway(self, last_id: int, code: int, debug: bytes) -> None:
        """The server takes no further streams, and has not processed those after the last one."""
        if code != ErrorCode.NO_ERROR and not self._goaway:
            text = debug[:200].decode(errors="replace")
            self._goaway = f"the server ended the connection: {name_of(code)} {text}".rstrip()
        if code == ErrorCode.HTTP_1_1_REQUIRED:
            self._owner.on_http1_required()
        self.retire()
        for stream_id in [each for each in self._streams if each > last_id]:
            text = "the server ends the connection and has not processed the request"
            self._break(stream_id, None, text, Failure.UNPROCESSED)

    def on_ping_ack(self, payload: bytes) -> None:
        """Whatever comes says that the server is alive."""

    # -- streams

    def start(self, exchange: Http2Exchange, request: UpstreamRequest) -> None:
        """Open the stream and send the request; the stream breaks later if the connection has ended."""
        if self._state is not ConnectionState.OPEN or self._transport.is_closing():
            self._loop.call_soon(self._refuse, exchange)
            return
        if not self._streams:
            self._unheard_since, self._silent_ticks = self._loop.time(), 0
        exchange.stream_id = stream_id = self.core.open(exchange)
        method, target, headers, body, rest = request
        exchange.more = rest != 0
        form = self._owner.upstream.form
        fields = [(b":method", method), (b":path", form.target(target) if form.rewrites else target)]
        fields += [header for header in headers if header[0] not in form.dropped]
        if rest is not None and (body or method not in (b"GET", b"HEAD")):
            fields.append((b"content-length", b"%d" % (len(body) + rest)))
        settings = self.core.settings
        block = settings.block_start + self._origin + encode_fields(fields) + form.block
        size = h2.DEFAULT_FRAME_SIZE
        head = h2.header_frames(stream_id, block, end_stream=not body and rest == 0, max_frame_size=size)
        self._bodies.add(exchange, head, body, settings.initial_window)

    def send_part(self, exchange: Http2Exchange, data: bytes) -> None:
        self._bodies.append(exchange, data)

    def _refuse(self, exchange: Http2Exchange) -> None:
        """The connection has ended before the request was sent."""
        self.end(exchange, None)
        exchange.break_off("the connection was closed", Failure.UNPROCESSED)

    def end(self, exchange: Http2Exchange, code: ErrorCode | None) -> None:
        """The stream has ended; with ``code`` by RST_STREAM."""
        if exchange.ended:
            return
        exchange.ended = True
        self.active -= 1
        self._bodies.forget(exchange)
        if exchange.stream_id:
            del self._streams[exchange.stream_id]
            self.plain_shapes.pop(exchange.stream_id, None)
            if code is not None and self._state is not ConnectionState.CLOSED:
                self._write(h2.rst_stream(exchange.stream_id, code))
        if not self.active:
            self._idle_since = self._loop.time()
            if self._state is ConnectionState.RETIRING:
                self._close(ErrorCode.NO_ERROR)

    def open_window(self, exchange: Http2Exchange, size: int) -> None:
        """Let the server send ``size`` bytes more."""
        self._write(h2.window_update(exchange.stream_id, size))

    def _break(self, stream_id: int, code: ErrorCode | None, reason: str, failure: Failure) -> None:
        """A stream ends before its reply is complete; with ``code`` by RST_STREAM."""
        if exchange := self._streams.get(stream_id):
            self.end(exchange, code)
            exchange.break_off(reason, failure)

    def _break_streams(self) -> None:
        """The connection has ended. Its streams are told so in several turns of the event loop."""
        reason = self._goaway or self._lost
        idle_closed = self._used and self._loop.time() - self._unheard_since <= IDLE_CLOSE_S
        for stream_id in list(self._streams)[:BROKEN_PER_TURN]:
            if idle_closed:
                text = f"the idle connection was closed: {reason}"
                self._break(stream_id, None, text, Failure.IDLE_CLOSED)
            else:
                self._break(stream_id, None, reason, Failure.NETWORK)
        if self._streams:
            self._loop.call_soon(self._break_streams)
        else:
            self.core.end()

    # -- the end

    def _fail(self, fault: ConnectionFault) -> None:
        """The server violates the protocol, or does not speak it."""
        self.core.end()
        self._frames, self._large = [], None
        self._scanner.clear()
        self._lost = f"it violated HTTP/2: {fault.reason}"
        if self._state is ConnectionState.CONNECTING:
            self._give_up_hello(self._lost)
            self._transport.abort()  # an HTTP/1.1 server would take more for a request
            return
        self._close(fault.code, fault.reason)
        self._break_streams()

    def _give_up_hello(self, reason: str) -> None:
        if not self.ready.done():
            self.ready.set_exception(NotHttp2Error(reason))
            self.ready.exception()  # nobody may wait for it

    def _tick(self) -> None:
        """Close an idle connection, and find out whether a silent one is alive."""
        if self._state is ConnectionState.CLOSED:
            return
        if not self.active:
            self._silent_ticks = 0
            if self._loop.time() - self._idle_since >= IDLE_S:
                self._close(ErrorCode.NO_ERROR)
                return
        else:
            self._silent_ticks += 1  # ticks, not seconds: this process may have been stopped
            if self._silent_ticks == SILENT_TICKS // 2:
                self._write(h2.ping(_PING))
            elif self._silent_ticks >= SILENT_TICKS:
                self._lost = "the server is silent and does not answer a PING"
                self._transport.abort()
                return
        self._timer = self._loop.call_later(self._tick_s, self._tick)
