"""One HTTP/2 connection of the load client: many requests at a time.

Frames are walked by hand: a DATA frame that holds whole events, which nearly all are, takes a few operations
on bytes and no object. Everything else goes to the core that servers have as well
(:mod:`penstock.http.http2.core`).
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence

import hpack

from penstock.bench.load.connection import Ended
from penstock.bench.load.latency import ReadLog
from penstock.bench.load.messages import LoadPlan
from penstock.bench.load.reply_counter import ERROR, EVENT, ReplyCounter, find_last
from penstock.http.http2 import frames as h2
from penstock.http.http2.core import Http2Core
from penstock.http.http2.faults import ConnectionFault, ErrorCode, StreamFault, name_of
from penstock.http.http2.header_blocks import TABLE_SIZE, Field
from penstock.http.http2.request_bodies import RequestBodies
from penstock.http.http2.roles import client_role

WINDOW = 2**26
"""Receive window of a connection: far more than a server writes between two reads. It is opened again in
hundreds of reads."""

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
    """One request and its reply; a :class:`penstock.http.http2.request_bodies.RequestStream`."""

    __slots__ = ("reply", "request", "send_window", "stream_id", "unsent")
    more = False

    def __init__(self, request: int) -> None:
        self.request = request
        self.reply = ReplyCounter()
        self.stream_id = self.send_window = 0
        self.unsent = memoryview(b"")

    def on_sent(self) -> None:
        """Nothing follows."""


class Http2LoadConnection:
    """A :class:`Connection`. ``window``: bytes that the server may send on each stream before it is granted
    more; the connection's window never runs out while it is fed."""

    whole_events = False

    def __init__(self, requests: Http2Requests, places: int, window: int = h2.MAX_WINDOW) -> None:
        self.places = places
        self.failure: str | None = None
        self._requests = requests
        role = client_role(
            receive_window=WINDOW,
            stream_window=window,
            window_changes=sys.maxsize,
            control_burst=sys.maxsize,
        )
        self._output = [role.hello]
        self._input = b""  # part of a frame
        self._log = ReadLog()  # of the read that is handled
        self._encoder = hpack.Encoder()
        self._heads: list[bytes] = []  # of the next request and, last, of all that follow

        # -- streams
        self._streams: dict[int, _Stream] = {}
        self._streaming: dict[int, int] = {}  # request by stream, of those between two events
        self._ended: list[Ended] = []
        self._bodies = RequestBodies(self._output.append, self._streams)
        self.core = Http2Core[_Stream](role, self._streams, self._bodies, self, 0.0)

    @property
    def ready(self) -> bool:
        return bool(self._heads)

    @property
    def running(self) -> int:
        return len(self._streams)

    @property
    def unsent(self) -> int:
        """Requests whose bodies the server does not take yet."""
        return len(self._bodies.waiting)

    @property
    def streams(self) -> list[int]:
        """Streams in flight."""
        return list(self._streams)

    def start(self, request: int) -> int:
        stream = _Stream(request)
        stream.stream_id = number = self.core.open(stream)
        length, body = self._requests.of(request)
        head = self._heads.pop(0) if len(self._heads) > 1 else self._heads[0]
        head = h2.frame(h2.HEADERS, h2.END_HEADERS, number, head + length)
        self._bodies.add(stream, head, body, self.core.settings.initial_window)
        return request

    def grant(self, stream: int, by: int) -> None:
        """Let the server send more on one stream."""
        self._output.append(h2.window_update(stream, by))

    def feed(self, data: bytes, log: ReadLog) -> list[Ended]:
        if self._input:
            data = self._input + data
        self._log = log
        unpack, request_of = _HEADER.unpack_from, self._streaming.get
        append_entry, append_count = log.entries.append, log.counts.append
        ends_with, count = data.endswith, data.count
        sound = data.find(ERROR) < 0 and find_last(data) is None
        position, unread, last = 0, 0, len(data) - h2.HEADER_BYTES
        while position <= last:
            high, low, kind, number = unpack(data, position)
            start = position + h2.HEADER_BYTES
            end = start + (high << 8 | low)
            if end > last + h2.HEADER_BYTES:
                break
            request = request_of(number)
            # Fast path of nearly all events: kind is the frame's type and flags.
            if kind == h2.DATA and request is not None and ends_with(_WHOLE_EVENTS, start, end) and sound:
                append_entry(request)
                append_count(count(EVENT, start, end))
                unread += end - start
            else:
                self._handle(kind >> 8, kind & 0xFF, number & h2.STREAM_BITS, data[start:end])
            position = end
        self._input = data[position:]
        most = self.core.settings.max_streams
        if most < self.places:
            self._fail(
                f"the server takes {most:,} streams per connection "
                f"(SETTINGS_MAX_CONCURRENT_STREAMS), {self.places:,} are needed: use more connections"
            )
        if (
            len(self._input) >= h2.HEADER_BYTES
            and int.from_bytes(self._input[:3], "big") > h2.DEFAULT_FRAME_SIZE
        ):
            self._fail(f"not a frame of HTTP/2: {self._input[:64]!r}")
        self.core.receive_window -= unread
        if self.core.receive_window < WINDOW // 2:
            self.core.refill()
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

    def _handle(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        try:
            self.core.handle(kind, flags, number, payload)
        except ConnectionFault as fault:
            greeting = "" if self.core.greeted else f": it began with {payload[:64]!r}"
            self._fail(f"{fault.reason}{greeting}")

    def on_data(
        self, stream_id: int, stream: _Stream | None, content: bytes, size: int, *, last: bool
    ) -> None:
        if stream is None:
            return  # it has ended, and was reset
        events = stream.reply.feed(content)
        self._log.entries.append(stream.request)
        self._log.counts.append(events)
        if last:
            self._end(stream_id)
        else:
            self._settle(stream_id, stream)

    def _settle(self, number: int, stream: _Stream) -> None:
        """Note whether the fast path may count the next event."""
        if stream.reply.between_events:
            self._streaming[number] = stream.request
        else:
            self._streaming.pop(number, None)

    def on_headers(self, stream_id: int, fields: list[Field] | None, size: int, *, last: bool) -> None:
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        if fields is None:
            raise StreamFault(stream_id, ErrorCode.CANCEL, "its headers are too large")
        status = dict(fields).get(b":status", b"")
        # Neither 1xx, which announces another head, nor trailers, which have no status.
        if status.isdigit() and not status.startswith(b"1"):
            stream.reply.status = int(status)
        if last:
            self._end(stream_id)
        else:
            self._settle(stream_id, stream)

    def on_reset(self, stream_id: int, stream: _Stream | None, code: int) -> None:
        self._end(stream_id, f"RST_STREAM: {name_of(code)}")

    def on_stream_fault(self, fault: StreamFault) -> None:
        self._output.append(h2.rst_stream(fault.stream_id, fault.code))
        self._end(fault.stream_id, fault.reason)

    def on_settings(self) -> None:
        size = min(self.core.settings.header_table_size, TABLE_SIZE)
        if not self._heads or size != self._encoder.header_table_size:
            self._encoder.header_table_size = size
            # The first block fills the table, those that follow refer to it and are all alike.
            self._heads = [self._encoder.encode(self._requests.fields) for _ in range(2)]

    def on_goaway(self, last_id: int, code: int, debug: bytes) -> None:
        reason = f"GOAWAY: {name_of(code)} {debug.decode(errors='replace')}".rstrip()
        self.failure = self.failure or reason
        for number in [each for each in self._streams if each > last_id]:
            self._end(number, reason)

    def on_ping_ack(self, payload: bytes) -> None:
        """None is sent."""

    # -- ends

    def _end(self, number: int, cut: str | None = None) -> None:
        stream = self._streams.pop(number, None)
        if stream is None:
            return
        self._streaming.pop(number, None)
        if stream.unsent and cut is None:
            self._output.append(h2.rst_stream(number, ErrorCode.CANCEL))
        self._bodies.forget(stream)
        self._ended.append(Ended(stream.request, stream.reply.end(cut)))

    def _fail(self, reason: str) -> None:
        """The connection is of no use any more: its requests end."""
        self.failure = self.failure or reason
        for number in list(self._streams):
            self._end(number, reason)

    def _take_ended(self) -> list[Ended]:
        ended, self._ended = self._ended, []
        return ended
