"""One HTTP/2 connection of the load client: many requests at a time.

Frames are walked by hand: a DATA frame that holds whole events, which nearly all are, takes a few operations
on bytes and no object. Everything else is handled by the slow path of its frame's type.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import hpack

from penstock.bench.load.connection import Ended
from penstock.bench.load.latency import ReadLog
from penstock.bench.load.messages import LoadPlan
from penstock.bench.load.reply_counter import ERROR, EVENT, ReplyCounter, find_last
from penstock.http.http2.faults import ConnectionFault, ErrorCode
from penstock.http.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_FRAME_SIZE,
    DEFAULT_WINDOW,
    ENABLE_PUSH,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADER_BYTES,
    HEADER_TABLE_SIZE,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_SIZE,
    MAX_WINDOW,
    PING,
    PREFACE,
    PRIORITY_FLAG,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    SETTINGS_ACK,
    STREAM_BITS,
    WINDOW_UPDATE,
    frame,
    ping,
    rst_stream,
    settings_frame,
    unpack_goaway,
    unpack_long,
    unpack_settings,
    window_update,
    without_padding,
)

WINDOW = 2**26
"""Receive window of a connection: far more than a server writes between two reads."""
UPDATE_BYTES = 2**24
"""Bytes read before the server is granted them again: a WINDOW_UPDATE in hundreds of reads."""

_HEADER = struct.Struct(">HBHI")
_WHOLE_EVENTS = b"}\n\n"


class Http2Requests:
    """The requests of a plan: header fields, which all have in common, and the bodies."""

    def __init__(self, plan: LoadPlan, bodies: Sequence[bytes]) -> None:
        name = f"[{plan.host}]" if ":" in plan.host else plan.host
        self.fields = [
            (b":method", b"POST"),
            (b":scheme", b"https" if plan.authority else b"http"),
            (b":path", plan.path.encode()),
            (b":authority", f"{name}:{plan.port}".encode()),
            (b"content-type", b"application/json"),
        ]
        if plan.api_key:
            key = hpack.NeverIndexedHeaderTuple(b"authorization", f"Bearer {plan.api_key}".encode())
            self.fields.append(key)
        self._bodies = bodies
        # content-length is a literal that is not indexed, with the name of static entry 28.
        lengths = [b"%d" % len(body) for body in bodies]
        self._lengths = [bytes((0x0F, 28 - 15, len(digits))) + digits for digits in lengths]

    def of(self, request: int) -> tuple[bytes, bytes]:
        """The field content-length and the body of the request of this number."""
        index = request % len(self._bodies)
        return self._lengths[index], self._bodies[index]


class _Stream:
    """One request and its reply. ``window``: bytes of ``body`` that the server takes as yet."""

    __slots__ = ("body", "reply", "request", "window")

    def __init__(self, request: int, body: bytes, window: int) -> None:
        self.request = request
        self.body = memoryview(body)
        self.window = window
        self.reply = ReplyCounter()


class Http2Connection:
    """A :class:`Connection`. ``window``: bytes that the server may send on each stream before it is granted
    more; the connection's window never runs out while it is fed."""

    whole_events = False

    def __init__(self, requests: Http2Requests, places: int, window: int = MAX_WINDOW) -> None:
        self.places = places
        self.ready = False
        self.failure: str | None = None
        self._requests = requests
        greeting = settings_frame({ENABLE_PUSH: 0, INITIAL_WINDOW_SIZE: window})
        self._output = [PREFACE, greeting, window_update(0, WINDOW - DEFAULT_WINDOW)]
        self._input = b""  # part of a frame
        self._unread = 0  # bytes of DATA that the server has not been granted again

        # -- header blocks
        self._decoder = hpack.Decoder()
        self._encoder = hpack.Encoder()
        self._heads: list[bytes] = []  # of the next request and, last, of all that follow
        self._block: tuple[int, int, bytes] | None = None  # stream, flags, fragments as yet

        # -- streams
        self._next = 1
        self._streams: dict[int, _Stream] = {}
        self._steady: dict[int, int] = {}  # request by stream, of those between two events
        self._ended: list[Ended] = []

        # -- what the server takes
        self._window = DEFAULT_WINDOW
        self._stream_window = DEFAULT_WINDOW
        self._frame_bytes = DEFAULT_FRAME_SIZE
        self._most_streams = MAX_WINDOW
        self._unsent: dict[int, _Stream] = {}

    @property
    def running(self) -> int:
        return len(self._streams)

    @property
    def unsent(self) -> int:
        """Requests whose bodies the server does not take yet."""
        return len(self._unsent)

    @property
    def streams(self) -> list[int]:
        """Streams in flight."""
        return list(self._streams)

    def start(self, request: int) -> int:
        number, self._next = self._next, self._next + 2
        length, body = self._requests.of(request)
        head = self._heads.pop(0) if len(self._heads) > 1 else self._heads[0]
        self._output.append(frame(HEADERS, END_HEADERS, number, head + length))
        stream = self._streams[number] = _Stream(request, body, self._stream_window)
        self._send_body(number, stream)
        return request

    def grant(self, stream: int, by: int) -> None:
        """Lets the server send more on one stream."""
        self._output.append(window_update(stream, by))

    def feed(self, data: bytes, log: ReadLog) -> list[Ended]:
        if self._input:
            data = self._input + data
        unpack, request_of = _HEADER.unpack_from, self._steady.get
        append_entry, append_count = log.entries.append, log.counts.append
        ends_with, count = data.endswith, data.count
        sound = data.find(ERROR) < 0 and find_last(data) is None
        position, unread, last = 0, 0, len(data) - HEADER_BYTES
        while position <= last:
            high, low, kind, number = unpack(data, position)
            start = position + HEADER_BYTES
            end = start + (high << 8 | low)
            if end > last + HEADER_BYTES:
                break
            request = request_of(number)
            # Fast path of nearly all events: kind is the frame's type and flags.
            if kind == DATA and request is not None and ends_with(_WHOLE_EVENTS, start, end) and sound:
                append_entry(request)
                append_count(count(EVENT, start, end))
                unread += end - start
            else:
                self._take_frame(kind >> 8, kind & 0xFF, number & STREAM_BITS, data[start:end], log)
            position = end
        self._input = data[position:]
        if self._most_streams < self.places:
            self._fail(
                f"the server takes {self._most_streams:,} streams per connection "
                f"(SETTINGS_MAX_CONCURRENT_STREAMS), {self.places:,} are needed: use more connections"
            )
        if len(self._input) >= HEADER_BYTES and int.from_bytes(self._input[:3], "big") > DEFAULT_FRAME_SIZE:
            self._fail(f"not a frame of HTTP/2: {self._input[:64]!r}")
        self._unread += unread
        if self._unread >= UPDATE_BYTES:
            self._output.append(window_update(0, self._unread))
            self._unread = 0
        return self._take_ended()

    def close(self) -> list[Ended]:
        self.failure = self.failure or "closed"
        for number, stream in list(self._streams.items()):
            early = "the connection ended before the reply did"
            self._end(number, early if stream.reply.status else "closed without a reply")
        return self._take_ended()

    def take_output(self) -> bytes:
        output = b"".join(self._output)
        self._output.clear()
        return output

    # -- frames from the server

    def _take_frame(self, kind: int, flags: int, number: int, payload: bytes, log: ReadLog) -> None:
        try:
            self._take_sound_frame(kind, flags, number, payload, log)
        except ConnectionFault as fault:
            self._fail(fault.reason)

    def _take_sound_frame(self, kind: int, flags: int, number: int, payload: bytes, log: ReadLog) -> None:
        if not self.ready and kind != SETTINGS:
            self._fail(f"the server did not begin with SETTINGS, but with {payload[:64]!r}")
        elif kind == DATA:
            self._take_data(flags, number, payload, log)
        elif kind == HEADERS:
            fragment = without_padding(flags, payload)
            self._block = number, flags, fragment[5:] if flags & PRIORITY_FLAG else fragment
            self._take_block(flags)
        elif kind == CONTINUATION and self._block is not None:
            first, first_flags, fragment = self._block
            self._block = first, first_flags, fragment + payload
            self._take_block(flags)
        elif kind == RST_STREAM:
            self._end(number, f"RST_STREAM: {_error_name(unpack_long(payload, 'RST_STREAM'))}")
        elif kind == SETTINGS and not flags & ACK:
            self._take_settings(payload)
        elif kind == PING and not flags & ACK:
            self._output.append(ping(payload, ack=True))
        elif kind == WINDOW_UPDATE:
            self._take_window(number, unpack_long(payload, "WINDOW_UPDATE"))
        elif kind == GOAWAY:
            self._take_goaway(payload)
        elif kind == PUSH_PROMISE:
            self._fail("the server pushes")

    def _take_data(self, flags: int, number: int, payload: bytes, log: ReadLog) -> None:
        self._unread += len(payload)
        stream = self._streams.get(number)
        if stream is None:
            return  # it has ended, and was reset
        events = stream.reply.feed(without_padding(flags, payload))
        log.entries.append(stream.request)
        log.counts.append(events)
        if flags & END_STREAM:
            self._end(number)
        else:
            self._settle(number, stream)

    def _settle(self, number: int, stream: _Stream) -> None:
        """Notes whether the fast path may count the next event."""
        if stream.reply.between_events:
            self._steady[number] = stream.request
        else:
            self._steady.pop(number, None)

    def _take_block(self, flags: int) -> None:
        """Decodes a header block when it is complete. All are decoded: they share the table of HPACK."""
        if not flags & END_HEADERS or self._block is None:
            return
        number, first_flags, block = self._block
        self._block = None
        try:
            fields = dict(self._decoder.decode(block, raw=True))
        except hpack.HPACKError as error:
            self._fail(f"a header block that cannot be decoded: {error!r}")
            return
        stream = self._streams.get(number)
        if stream is None:
            return
        status = fields.get(b":status", b"")
        # Neither 1xx, which announces another head, nor trailers, which have no status.
        if status.isdigit() and not status.startswith(b"1"):
            stream.reply.status = int(status)
        if first_flags & END_STREAM:
            self._end(number)
        else:
            self._settle(number, stream)

    def _take_settings(self, payload: bytes) -> None:
        values = dict(unpack_settings(payload))
        self._output.append(SETTINGS_ACK)
        self._most_streams = values.get(MAX_CONCURRENT_STREAMS, self._most_streams)
        if not self.ready or HEADER_TABLE_SIZE in values:
            self._encoder.header_table_size = min(values.get(HEADER_TABLE_SIZE, 4096), 4096)
            # The first block fills the table, those that follow refer to it and are all alike.
            self._heads = [self._encoder.encode(self._requests.fields) for _ in range(2)]
        self._frame_bytes = values.get(MAX_FRAME_SIZE, self._frame_bytes)
        if INITIAL_WINDOW_SIZE in values:
            grown = values[INITIAL_WINDOW_SIZE] - self._stream_window
            self._stream_window += grown
            for stream in self._streams.values():
                stream.window += grown
        self.ready = True
        self._send_bodies()

    def _take_window(self, number: int, by: int) -> None:
        if not number:
            self._window += by
        elif number in self._streams:
            self._streams[number].window += by
        self._send_bodies()

    def _take_goaway(self, payload: bytes) -> None:
        last, code, debug = unpack_goaway(payload)
        reason = f"GOAWAY: {_error_name(code)} {debug.decode(errors='replace')}".rstrip()
        self.failure = self.failure or reason
        for number in [each for each in self._streams if each > last]:
            self._end(number, reason)

    # -- bodies to the server

    def _send_bodies(self) -> None:
        for number, stream in list(self._unsent.items()):
            if self._window <= 0:
                break
            self._send_body(number, stream)

    def _send_body(self, number: int, stream: _Stream) -> None:
        """Sends what the server takes of a body."""
        body = stream.body
        while body and (size := min(len(body), self._window, stream.window, self._frame_bytes)) > 0:
            piece, body = body[:size], body[size:]
            self._output.append(frame(DATA, 0 if body else END_STREAM, number, bytes(piece)))
            self._window -= size
            stream.window -= size
        stream.body = body
        if body:
            self._unsent[number] = stream
        else:
            self._unsent.pop(number, None)

    # -- ends

    def _end(self, number: int, cut: str | None = None) -> None:
        stream = self._streams.pop(number, None)
        if stream is None:
            return
        self._steady.pop(number, None)
        if self._unsent.pop(number, None) is not None and cut is None:
            self._output.append(rst_stream(number, ErrorCode.CANCEL))
        self._ended.append(Ended(stream.request, stream.reply.end(cut)))

    def _fail(self, reason: str) -> None:
        """The connection is of no use any more: its requests end."""
        self.failure = self.failure or reason
        for number in list(self._streams):
            self._end(number, reason)

    def _take_ended(self) -> list[Ended]:
        ended, self._ended = self._ended, []
        return ended


def _error_name(code: int) -> str:
    return ErrorCode(code).name if code in set(ErrorCode) else f"error {code}"
