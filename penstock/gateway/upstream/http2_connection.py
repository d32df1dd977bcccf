"""A connection to a model server over HTTP/2: many requests at a time, replies as callbacks.

One read brings a step's events of many streams; each is handed to its receiver without a parser or task in
between. What the server may cause is bounded: frames that carry no content are counted, header blocks and
windows are limited, and one read takes no longer than a turn of the event loop allows.
"""

from __future__ import annotations

import asyncio
import enum
import math
import time
from typing import Protocol, cast

from penstock.gateway.upstream.exchange import (
    IDLE_CLOSE_S,
    IDLE_S,
    PIECE_BYTES,
    REPLACED,
    TURN_S,
    Failure,
    UpstreamError,
    UpstreamRequest,
)
from penstock.gateway.upstream.http2_bodies import RequestBodies
from penstock.gateway.upstream.http2_exchange import REFILL_BELOW, WINDOW, Http2Exchange
from penstock.gateway.upstream.reply_scanner import PlainEventRelay, ReplyScanner
from penstock.http.http2 import frames as h2
from penstock.http.http2.faults import ConnectionFault, ErrorCode, StreamFault
from penstock.http.http2.header_blocks import (
    NO_TABLE,
    TABLE_SIZE,
    HeaderDecoder,
    HeaderListTooLarge,
    encode_fields,
)
from penstock.http.http2.rates import BYTES_PER_CONTROL, RateLimit, control_limit

CONNECTION_WINDOW = 16 << 20
"""Receive window of a connection. It is opened again for all that comes, as streams have windows of their
own: a slow client does not stop the streams of others."""
MAX_HEADER_BYTES = 64 << 10
"""Maximum size of the header list of a reply."""
MAX_FIELDS = 256
MAX_BLOCK_FRAMES = 16
"""Frames of one header block."""
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

_SETTINGS = h2.settings_frame(
    {
        h2.ENABLE_PUSH: 0,
        h2.INITIAL_WINDOW_SIZE: WINDOW,
        h2.MAX_HEADER_LIST_SIZE: MAX_HEADER_BYTES,
    }
)
_HELLO = h2.PREFACE + _SETTINGS + h2.window_update(0, CONNECTION_WINDOW - h2.DEFAULT_WINDOW)
_PING = b"penstock"


class NotHttp2Error(UpstreamError):
    """The server answers something else than HTTP/2, or nothing."""


class State(enum.Enum):
    CONNECTING = enum.auto()
    """The server has not sent its SETTINGS."""
    OPEN = enum.auto()
    RETIRING = enum.auto()
    """It takes no further streams, and ends with its last one."""
    CLOSED = enum.auto()


class Http2Owner(Protocol):
    """Whoever keeps the connections to an endpoint."""

    def on_http2_closed(self, connection: Http2Connection) -> None: ...

    def on_http1_required(self) -> None:
        """The server takes some requests over HTTP/1.1 only."""
        ...


class Http2Connection(asyncio.Protocol):
    """One connection. Streams are taken with :meth:`take` and send their request later."""

    def __init__(self, owner: Http2Owner, *, scheme: bytes, authority: bytes, silence_s: float) -> None:
        """``silence_s``: after this time without anything from the server its streams fail."""
        self._owner = owner
        self._origin = encode_fields([(b":scheme", scheme), (b":authority", authority)])
        self._block_start = b""
        """What every header block begins with."""
        self._tick_s = min(silence_s / SILENT_TICKS, IDLE_S)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._out: list[bytes] = []
        """Frames that are written at the end of this iteration of the event loop."""
        self._bodies = RequestBodies(self._write)
        self.ready: asyncio.Future[None] = self._loop.create_future()
        """Done with the server's SETTINGS. Raises NotHttp2Error."""
        self._state = State.CONNECTING
        self._scanner = ReplyScanner()
        self.lanes = self._scanner.lanes
        """Streams whose plain events go to ``plain_events``, by stream id."""
        self.plain_events: PlainEventRelay | None = None
        self._decoder = HeaderDecoder()
        self._streams: dict[int, Http2Exchange] = {}
        self.active = 0
        """Streams that were taken and have not ended."""
        self._max_streams = LAST_STREAM_ID
        """Maximum of streams that the server allows."""
        self._next_id = 1
        self._window = CONNECTION_WINDOW
        """Bytes that the server may send."""
        self._block: list[bytes] = []
        """Parts of a header block that is not complete."""
        self._block_of = self._block_flags = 0
        """Stream and flags of that block; 0: there is none."""
        self._frames: list[h2.Frame] = []
        """Frames that are left for the next turn; the transport does not read while there are any."""
        self._write_paused = False
        self._refused_until = 0.0
        """Until when it takes no stream, as the server has refused one."""
        self._control = control_limit(self._loop.time())
        self._window_changes = RateLimit("changes of windows by SETTINGS", 100, 10, self._loop.time())
        """Each goes through all streams."""
        self._silent_ticks = 0
        self._timer: asyncio.TimerHandle | None = None
        self._idle_since = 0.0
        self._unheard_since = -math.inf
        """When a stream was sent while no other was open; -inf: the server has said something since."""
        self._used = False
        """It has carried a reply."""
        self._waits_for_turn = False
        self._failed = False
        """The server has violated the protocol; nothing of it is read."""
        self._lost = ""
        """Why the streams that are left break; empty: they do not."""
        self._goaway = ""
        """The error that the server has given as the reason."""

    # -- the pool

    @property
    def has_room(self) -> bool:
        """Whether it takes another stream."""
        return (
            self._state is State.OPEN
            and self.active < self._max_streams
            and not self._write_paused
            and self._next_id < LAST_STREAM_ID
            and (not self._refused_until or self._loop.time() >= self._refused_until)
        )

    def take(self) -> Http2Exchange:
        """A stream, which counts from now on."""
        self.active += 1
        return Http2Exchange(self)

    def abort(self) -> None:
        """Close immediately."""
        self._transport.abort()

    def retire(self) -> None:
        """Take no further streams, and close after the last one."""
        if self._state in (State.CONNECTING, State.OPEN):
            self._state = State.RETIRING
            self._owner.on_http2_closed(self)
        if not self.active:
            self._close(ErrorCode.NO_ERROR)

    def _close(self, code: ErrorCode, reason: str = "") -> None:
        if self._state is State.CLOSED:
            return
        self._state = State.CLOSED
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
        self._transport.write(_HELLO)

    def pause_writing(self) -> None:
        self._write_paused = True
        self._bodies.pause()

    def resume_writing(self) -> None:
        self._write_paused = False
        self._bodies.resume()

    def data_received(self, data: bytes) -> None:
        self._silent_ticks, self._unheard_since = 0, -math.inf
        if self._failed:
            return
        self._scanner.receive(data)
        if not self._waits_for_turn:
            self._process()

    def connection_lost(self, exc: Exception | None) -> None:
        self._state = State.CLOSED
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
        started = time.perf_counter()
        try:
            late = self._handle_frames(started)
        except ConnectionFault as fault:
            self._fail(fault)
            return
        if self._window < CONNECTION_WINDOW // 2:
            self._write(h2.window_update(0, CONNECTION_WINDOW - self._window))
            self._window = CONNECTION_WINDOW
        if late:
            self._wait_for_turn()
        elif self._lost:
            self._break_streams()

    def _handle_frames(self, started: float) -> bool:
        """Returns whether frames are left for the next turn. Raises ConnectionFault."""
        now, frames = self._loop.time(), self._frames
        while True:
            slots: list[int] = []
            if not frames:
                events: list[bytes] = []
                texts: list[bytes] = []
                frames = self._scanner.take(slots, events, texts)
                if slots:
                    assert self.plain_events is not None  # there are lanes
                    self._window -= sum(map(len, events))
                    self.plain_events.take(slots, events, texts, now)
            if frames:
                self._frames = frames = self._handle(frames, started, now)
            elif not slots:
                return False
            if frames or time.perf_counter() - started > TURN_S:
                return True

    def _handle(self, batch: list[h2.Frame], started: float, now: float) -> list[h2.Frame]:
        """Handle frames in order; returns those for which no time is left. Raises ConnectionFault."""
        find = self._streams.get
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
                    self._window -= received
                    return batch[index + 1 :]
            rest = self._take_frame((kind, flags, stream_id, payload), now)
            while rest is not None and time.perf_counter() - started <= TURN_S:
                rest = self._take_frame(rest, now)
            if rest is not None:
                self._window -= received
                return [rest, *batch[index + 1 :]]
        self._window -= received
        return []

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

    # -- frames

    def _take_frame(self, frame: h2.Frame, now: float) -> h2.Frame | None:
        """Handle one frame; returns the rest of a large one. Raises ConnectionFault."""
        kind, flags, stream_id, payload = frame
        if self._failed or (self._state is State.CLOSED and not self._lost):
            return None
        if self._state is State.CONNECTING and (kind != h2.SETTINGS or flags):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "it does not begin with SETTINGS")
        if self._block_of and (kind != h2.CONTINUATION or stream_id != self._block_of):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "another frame within a header block")
        try:
            if kind == h2.DATA:
                return self._take_data(flags, stream_id, payload, now)
            self._take_other(kind, flags, stream_id, payload)
        except StreamFault as fault:
            self._break(stream_id, fault.code, f"it violated HTTP/2: {fault.reason}", Failure.NETWORK)
        return None

    def _take_data(self, flags: int, stream_id: int, payload: bytes, now: float) -> h2.Frame | None:
        content = h2.without_padding(flags, payload)
        rest = None
        size = len(payload)
        if len(content) > PIECE_BYTES:
            size -= len(content) - PIECE_BYTES
            rest = h2.DATA, flags & ~h2.PADDED, stream_id, content[PIECE_BYTES:]
            content = content[:PIECE_BYTES]
        self._window -= size
        if self._window < 0:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "more content than the connection's window")
        if not content and not flags & h2.END_STREAM:
            self._count_control()
        exchange = self._find(stream_id)
        if exchange is None:
            return rest
        exchange.window -= size
        if exchange.window < 0:
            raise StreamFault(stream_id, ErrorCode.FLOW_CONTROL_ERROR, "more content than its window")
        exchange.take_content(content, now)
        if rest is None and flags & h2.END_STREAM:
            exchange.take_end()
        else:
            exchange.refill()
        return rest

    def _take_other(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Raises ConnectionFault, StreamFault."""
        if (kind in _OF_CONNECTION) != (stream_id == 0) and kind in _KNOWN and kind != h2.WINDOW_UPDATE:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"a frame of type {kind} on stream {stream_id}")
        if kind == h2.HEADERS:
            payload = h2.without_padding(flags, payload)
            if flags & h2.PRIORITY_FLAG:
                payload = payload[5:]
            self._block, self._block_of, self._block_flags = [payload], stream_id, flags
            if flags & h2.END_HEADERS:
                self._take_block()
            return
        self._count_control()
        match kind:
            case h2.CONTINUATION:
                self._take_continuation(flags, payload)
            case h2.RST_STREAM:
                self._take_reset(stream_id, h2.unpack_long(payload, "RST_STREAM"))
            case h2.SETTINGS:
                self._take_settings(flags, payload)
            case h2.PING:
                if len(payload) != 8:
                    raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "the length of PING is not 8")
                if not flags & h2.ACK:
                    self._write(h2.ping(payload, ack=True))
            case h2.GOAWAY:
                self._take_goaway(*h2.unpack_goaway(payload))
            case h2.WINDOW_UPDATE:
                increment = h2.unpack_long(payload, "WINDOW_UPDATE") & h2.STREAM_BITS
                if not stream_id:
                    self._bodies.on_window(increment)
                elif exchange := self._find(stream_id):
                    self._bodies.on_stream_window(exchange, increment)
            case h2.PUSH_PROMISE:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a push, which it was told not to send")

    def _take_continuation(self, flags: int, payload: bytes) -> None:
        if not self._block_of:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        self._block.append(payload)
        if sum(map(len, self._block)) > MAX_HEADER_BYTES or len(self._block) > MAX_BLOCK_FRAMES:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "a header block is too large")
        if flags & h2.END_HEADERS:
            self._take_block()

    def _take_block(self) -> None:
        """A header block is complete."""
        block, stream_id, flags = b"".join(self._block), self._block_of, self._block_flags
        self._block, self._block_of = [], 0
        try:
            fields = self._decoder.decode(block, MAX_HEADER_BYTES, MAX_FIELDS)
        except HeaderListTooLarge:
            text = f"its headers are more than {MAX_HEADER_BYTES} bytes or {MAX_FIELDS}"
            raise StreamFault(stream_id, ErrorCode.CANCEL, text) from None
        exchange = self._find(stream_id)
        if exchange is None:
            self._count_control()
            return
        self._used = True
        exchange.take_fields(fields, len(block) + h2.HEADER_BYTES, last=bool(flags & h2.END_STREAM))

    def _take_reset(self, stream_id: int, code: int) -> None:
        exchange = self._find(stream_id)
        if exchange is None:
            return
        failure = Failure.SERVER if code == ErrorCode.INTERNAL_ERROR else Failure.NETWORK
        if code in (ErrorCode.REFUSED_STREAM, ErrorCode.HTTP_1_1_REQUIRED) and not exchange.answered:
            failure = Failure.UNPROCESSED
            if code == ErrorCode.REFUSED_STREAM:
                self._refused_until = self._loop.time() + REFUSED_S
            else:
                self._owner.on_http1_required()
        self._break(stream_id, None, f"the server reset the stream: {_name_of(code)}", failure)

    def _take_settings(self, flags: int, payload: bytes) -> None:
        if flags & h2.ACK:
            if payload:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "an acknowledgement with SETTINGS")
            return
        settings = dict(h2.unpack_settings(payload))
        if settings.get(h2.ENABLE_PUSH):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "it wants to be sent pushes")
        size = settings.get(h2.MAX_FRAME_SIZE, h2.DEFAULT_FRAME_SIZE)
        if not h2.DEFAULT_FRAME_SIZE <= size <= h2.LARGEST_FRAME_SIZE:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"a maximum frame size of {size}")
        self._max_streams = settings.get(h2.MAX_CONCURRENT_STREAMS, self._max_streams)
        if settings.get(h2.HEADER_TABLE_SIZE, TABLE_SIZE) < TABLE_SIZE:
            self._block_start = NO_TABLE
        if h2.INITIAL_WINDOW_SIZE in settings:
            self._window_changes.spend(self._loop.time(), 0)
            self._bodies.on_initial_window(settings[h2.INITIAL_WINDOW_SIZE], self._streams.values())
        self._write(h2.SETTINGS_ACK)
        if self._state is State.CONNECTING:
            self._state = State.OPEN
            self._idle_since = self._loop.time()
            self._timer = self._loop.call_later(self._tick_s, self._tick)
            self.ready.set_result(None)

    def _take_goaway(self, last_stream_id: int, code: int, debug: bytes) -> None:
        """The server takes no further streams, and has not processed those after the last one."""
        if code != ErrorCode.NO_ERROR and not self._goaway:
            text = debug[:200].decode(errors="replace")
            self._goaway = f"the server ended the connection: {_name_of(code)} {text}".rstrip()
        if code == ErrorCode.HTTP_1_1_REQUIRED:
            self._owner.on_http1_required()
        self.retire()
        for stream_id in [each for each in self._streams if each > last_stream_id]:
            text = "the server ends the connection and has not processed the request"
            self._break(stream_id, None, text, Failure.UNPROCESSED)

    def _find(self, stream_id: int) -> Http2Exchange | None:
        """The open stream with this id; None: it has ended. Raises ConnectionFault."""
        exchange = self._streams.get(stream_id)
        if exchange is None and (not stream_id & 1 or stream_id >= self._next_id):
            raise ConnectionFault(
                ErrorCode.PROTOCOL_ERROR, f"a frame on stream {stream_id}, which is not open"
            )
        return exchange

    def _count_control(self) -> None:
        """A frame that brings nothing to a client. Raises ConnectionFault if there are too many of them."""
        self._control.spend(self._loop.time(), self._bodies.sent // BYTES_PER_CONTROL)

    # -- streams

    def start(self, exchange: Http2Exchange, request: UpstreamRequest) -> None:
        if self._state is not State.OPEN or self._transport.is_closing():
            self._loop.call_soon(self._refuse, exchange)
            return
        if not self._streams:
            self._unheard_since, self._silent_ticks = self._loop.time(), 0
        exchange.stream_id = stream_id = self._next_id
        self._next_id += 2
        self._streams[stream_id] = exchange
        method, target, headers, body = request
        fields = [(b":method", method), (b":path", target)]
        fields += [header for header in headers if header[0] not in REPLACED]
        if body or method not in (b"GET", b"HEAD"):
            fields.append((b"content-length", b"%d" % len(body)))
        block = self._block_start + self._origin + encode_fields(fields)
        size = h2.DEFAULT_FRAME_SIZE
        head = h2.header_frames(stream_id, block, end_stream=not body, max_frame_size=size)
        self._bodies.add(exchange, head, body)

    def _refuse(self, exchange: Http2Exchange) -> None:
        """The connection has ended before the request was sent."""
        self.end(exchange, None)
        exchange.break_off("the connection was closed", Failure.UNPROCESSED)

    def end(self, exchange: Http2Exchange, code: ErrorCode | None) -> None:
        if exchange.ended:
            return
        exchange.ended = True
        self.active -= 1
        self._bodies.forget(exchange)
        if exchange.stream_id:
            del self._streams[exchange.stream_id]
            self.lanes.pop(exchange.stream_id, None)
            if code is not None and self._state is not State.CLOSED:
                self._write(h2.rst_stream(exchange.stream_id, code))
        if not self.active:
            self._idle_since = self._loop.time()
            if self._state is State.RETIRING:
                self._close(ErrorCode.NO_ERROR)

    def open_window(self, exchange: Http2Exchange, size: int) -> None:
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

    # -- the end

    def _fail(self, fault: ConnectionFault) -> None:
        """The server violates the protocol, or does not speak it."""
        self._failed = True
        self._frames = []
        self._scanner.clear()
        self._lost = f"it violated HTTP/2: {fault.reason}"
        if self._state is State.CONNECTING:
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
        """Closes an idle connection, and finds out whether a silent one is alive."""
        if self._state is State.CLOSED:
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


_OF_CONNECTION = frozenset((h2.SETTINGS, h2.PING, h2.GOAWAY))
_KNOWN = frozenset(range(h2.CONTINUATION + 1))


def _name_of(code: int) -> str:
    try:
        return ErrorCode(code).name
    except ValueError:
        return f"error {code}"
