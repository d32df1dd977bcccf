"""What a server may do to a connection over HTTP/2: violations end what they concern, floods are bounded."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from penstock.gateway.upstream import http2_connection
from penstock.gateway.upstream.connection_pool import ConnectionPool
from penstock.gateway.upstream.exchange import Failure, UpstreamRequest
from penstock.gateway.upstream.http2_connection import CONNECTION_WINDOW, Http2UpstreamConnection
from penstock.gateway.upstream.http2_exchange import WINDOW
from penstock.gateway.upstream.timeouts import Timeouts
from penstock.gateway.upstream.upstream import Upstream
from penstock.http.http1.reply_reader import MAX_OVERHEAD_BYTES
from penstock.http.http2 import frames as h2
from penstock.http.http2.faults import ErrorCode
from penstock.http.http2.header_blocks import encode_fields
from penstock.http.http2.roles import MAX_REPLY_HEADER_BYTES
from tests.gateway.upstream.receivers import Collected

REQUEST = UpstreamRequest(b"POST", b"/x", [], b"body")
HEAD = h2.frame(h2.HEADERS, h2.END_HEADERS, 1, encode_fields([(b":status", b"200")]))
HELLO = h2.settings_frame({})


class FakeTransport(asyncio.Transport):
    """A connection whose reads the test makes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.reading = True
        self.closing = False

    def write(self, data: Any) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class Peer:
    """A connection to a server that a test plays, with one request sent."""

    def __init__(self, hello: bytes = HELLO) -> None:
        pool = ConnectionPool("http://127.0.0.1:1", Upstream(Timeouts(connect=1.0)))
        self.connection: Http2UpstreamConnection = pool.make_http2()
        self.transport = FakeTransport()
        self.connection.connection_made(self.transport)
        self.connection.data_received(hello)
        self.reply = Collected()
        self.exchange = self.connection.open_exchange()
        self.exchange.send(REQUEST, self.reply)

    async def receive(self, data: bytes) -> None:
        self.connection.data_received(data)
        await self.settle()

    async def settle(self) -> None:
        await asyncio.sleep(0)
        while self.connection._waits_for_turn:  # noqa: ASYNC110 - turns are what is tested
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    def frames(self, kind: int) -> list[h2.Frame]:
        """Those of a kind that were sent to the server."""
        scanner = h2.FrameScanner()
        scanner.receive(self.transport.written.removeprefix(h2.PREFACE))
        return [frame for frame in scanner.take_frames(1 << 20) if frame[0] == kind]

    def ended_with(self) -> ErrorCode:
        """The code of GOAWAY."""
        [(_, _, _, payload)] = self.frames(h2.GOAWAY)
        return ErrorCode(h2.unpack_goaway(payload)[1])


def run(main: Callable[[], Any]) -> None:
    asyncio.run(main())


def data(payload: bytes, flags: int = 0, stream_id: int = 1) -> bytes:
    return h2.frame(h2.DATA, flags, stream_id, payload)


def block(*fields: tuple[bytes, bytes], flags: int = h2.END_HEADERS, stream_id: int = 1) -> bytes:
    return h2.frame(h2.HEADERS, flags, stream_id, encode_fields(fields))


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (h2.frame(h2.DATA, 0, 0, b"x"), ErrorCode.PROTOCOL_ERROR),
        (data(b"x", stream_id=3), ErrorCode.PROTOCOL_ERROR),
        (data(b"x", stream_id=2), ErrorCode.PROTOCOL_ERROR),
        (HEAD + data(b"\x05abc", h2.PADDED), ErrorCode.PROTOCOL_ERROR),
        (h2.frame_header(16_385, h2.DATA, 0, 1), ErrorCode.FRAME_SIZE_ERROR),
        (h2.frame(h2.HEADERS, h2.END_HEADERS, 1, b"\xff\xff\xff\xff\xff"), ErrorCode.COMPRESSION_ERROR),
        (h2.frame(h2.HEADERS, 0, 1, b"\x88") + h2.ping(bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (h2.frame(h2.CONTINUATION, h2.END_HEADERS, 1, b""), ErrorCode.PROTOCOL_ERROR),
        (h2.frame(h2.PUSH_PROMISE, h2.END_HEADERS, 1, b"\0\0\0\2\x88"), ErrorCode.PROTOCOL_ERROR),
        (h2.frame(h2.PING, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (h2.frame(h2.PING, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
        (h2.frame(h2.SETTINGS, 0, 0, bytes(5)), ErrorCode.FRAME_SIZE_ERROR),
        (h2.frame(h2.SETTINGS, h2.ACK, 0, bytes(6)), ErrorCode.FRAME_SIZE_ERROR),
        (h2.settings_frame({h2.ENABLE_PUSH: 1}), ErrorCode.PROTOCOL_ERROR),
        (h2.settings_frame({h2.MAX_FRAME_SIZE: 1}), ErrorCode.PROTOCOL_ERROR),
        (h2.settings_frame({h2.INITIAL_WINDOW_SIZE: 2**31}), ErrorCode.FLOW_CONTROL_ERROR),
        (h2.window_update(0, 0), ErrorCode.PROTOCOL_ERROR),
        (h2.window_update(0, h2.MAX_WINDOW), ErrorCode.FLOW_CONTROL_ERROR),
        (h2.window_update(3, 1), ErrorCode.PROTOCOL_ERROR),
        (h2.rst_stream(3, 0), ErrorCode.PROTOCOL_ERROR),
        (h2.frame(h2.RST_STREAM, 0, 1, b""), ErrorCode.FRAME_SIZE_ERROR),
        (h2.frame(h2.GOAWAY, 0, 0, b""), ErrorCode.FRAME_SIZE_ERROR),
        (h2.ping(bytes(8)) * 20_000, ErrorCode.ENHANCE_YOUR_CALM),
        (HELLO * 20_000, ErrorCode.ENHANCE_YOUR_CALM),
        (h2.window_update(0, 1) * 20_000, ErrorCode.ENHANCE_YOUR_CALM),
        (HEAD + data(b"") * 20_000, ErrorCode.ENHANCE_YOUR_CALM),
        (h2.frame(h2.PRIORITY, 0, 1, bytes(5)) * 20_000, ErrorCode.ENHANCE_YOUR_CALM),
        (h2.frame(77, 0, 0, b"") * 20_000, ErrorCode.ENHANCE_YOUR_CALM),
        (
            b"".join(h2.settings_frame({h2.INITIAL_WINDOW_SIZE: 1000 + n}) for n in range(2000)),
            ErrorCode.ENHANCE_YOUR_CALM,
        ),
        (
            h2.frame(h2.HEADERS, 0, 1, b"\x88") + h2.frame(h2.CONTINUATION, 0, 1, b"") * 100,
            ErrorCode.ENHANCE_YOUR_CALM,
        ),
    ],
)
def test_a_violation_ends_the_connection(sent: bytes, code: ErrorCode) -> None:
    async def main() -> None:
        peer = Peer()
        await peer.receive(sent)
        assert peer.ended_with() is code
        assert peer.transport.closing
        assert peer.reply.failure is Failure.NETWORK
        assert not peer.connection.has_room
        await peer.receive(sent)  # nothing more is read
        assert peer.ended_with() is code

    run(main)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (data(b"x"), ErrorCode.PROTOCOL_ERROR),
        (data(b"", h2.END_STREAM), ErrorCode.PROTOCOL_ERROR),
        (block((b"a", b"b")), ErrorCode.PROTOCOL_ERROR),
        (block((b":status", b"2x0")), ErrorCode.PROTOCOL_ERROR),
        (block((b":status", b"099")), ErrorCode.PROTOCOL_ERROR),
        (block((b":status", b"101")), ErrorCode.PROTOCOL_ERROR),
        (block((b":status", b"200"), (b":path", b"/")), ErrorCode.PROTOCOL_ERROR),
        (block((b":status", b"200"), (b"Upper", b"x")), ErrorCode.PROTOCOL_ERROR),
        (block((b":status", b"200"), (b"a", b"b\r\nc: d")), ErrorCode.PROTOCOL_ERROR),
        (block((b":status", b"200"), (b"connection", b"close")), ErrorCode.PROTOCOL_ERROR),
        (block((b":status", b"200"), (b"transfer-encoding", b"chunked")), ErrorCode.PROTOCOL_ERROR),
        (block((b":status", b"200"), (b"content-length", b"+1")), ErrorCode.PROTOCOL_ERROR),
        (
            block((b":status", b"200"), (b"content-length", b"1"), (b"content-length", b"1")),
            ErrorCode.PROTOCOL_ERROR,
        ),
        (block((b":status", b"200"), (b"content-length", b"1")) + data(b"xy"), ErrorCode.PROTOCOL_ERROR),
        (
            block((b":status", b"200"), (b"content-length", b"3")) + data(b"xy", h2.END_STREAM),
            ErrorCode.PROTOCOL_ERROR,
        ),
        (HEAD + HEAD, ErrorCode.PROTOCOL_ERROR),
        (HEAD + block((b":status", b"200"), flags=h2.END_HEADERS | h2.END_STREAM), ErrorCode.PROTOCOL_ERROR),
        (block((b":status", b"103"), flags=h2.END_HEADERS | h2.END_STREAM), ErrorCode.PROTOCOL_ERROR),
        (
            block((b":status", b"103"), (b"a", b"x" * 16_000)) * (MAX_OVERHEAD_BYTES // 16_000 + 1),
            ErrorCode.PROTOCOL_ERROR,
        ),
        (block((b":status", b"200"), *((b"a", b"x"),) * 300), ErrorCode.CANCEL),
        (HEAD + h2.window_update(1, 0), ErrorCode.PROTOCOL_ERROR),
        (HEAD + h2.window_update(1, h2.MAX_WINDOW), ErrorCode.FLOW_CONTROL_ERROR),
    ],
)
def test_a_violation_within_a_stream_ends_the_stream_alone(sent: bytes, code: ErrorCode) -> None:
    async def main() -> None:
        peer = Peer()
        await peer.receive(b"".join(_fitting(*frame) for frame in _split(sent)))
        assert not peer.transport.closing
        [(_, _, stream_id, payload)] = peer.frames(h2.RST_STREAM)
        assert (stream_id, int.from_bytes(payload, "big")) == (1, code)
        assert peer.reply.failure is Failure.NETWORK
        assert peer.connection.active == 0
        await peer.receive(data(b"late") + block((b"late", b"1")) + h2.rst_stream(1, 0))
        assert not peer.transport.closing, "frames of a closed stream are ignored"

    run(main)


def _split(sent: bytes) -> list[h2.Frame]:
    scanner = h2.FrameScanner(1 << 20)
    scanner.receive(sent)
    return scanner.take_frames(1 << 20)


def _fitting(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    """The frame, or a header block that is too large for one as several."""
    if kind != h2.HEADERS:
        return h2.frame(kind, flags, stream_id, payload)
    end = bool(flags & h2.END_STREAM)
    return h2.header_frames(stream_id, payload, end_stream=end, max_frame_size=h2.DEFAULT_FRAME_SIZE)


def test_windows_bound_what_is_held() -> None:
    async def main() -> None:
        peer = Peer()
        await peer.receive(HEAD)
        peer.exchange.pause(peer.reply)
        piece = data(bytes(16_384))
        await peer.receive(piece * (WINDOW // 16_384))
        assert not peer.frames(h2.RST_STREAM)
        await peer.receive(data(b"x"))
        assert peer.frames(h2.RST_STREAM)
        assert len(peer.reply.body) <= WINDOW

    run(main)


def test_content_of_streams_that_were_left_counts_for_the_connection() -> None:
    async def main() -> None:
        peer = Peer()
        peer.exchange.abort()
        updates = len(peer.frames(h2.WINDOW_UPDATE))
        for _ in range(CONNECTION_WINDOW // 16_384):
            await peer.receive(data(bytes(16_384)))
        assert len(peer.frames(h2.WINDOW_UPDATE)) > updates
        assert not peer.transport.closing

    run(main)


def test_a_header_block_without_end_is_bounded() -> None:
    async def main() -> None:
        peer = Peer()
        part = h2.frame(h2.CONTINUATION, 0, 1, bytes(16_384))
        sent = 0
        await peer.receive(h2.frame(h2.HEADERS, 0, 1, b""))
        while not peer.transport.closing:
            await peer.receive(part)
            sent += 16_384
            assert sent <= 2 * MAX_REPLY_HEADER_BYTES
        assert peer.ended_with() is ErrorCode.ENHANCE_YOUR_CALM

    run(main)


def test_replies_do_not_depend_on_how_they_are_cut() -> None:
    sent = (
        block((b":status", b"103"))
        + HEAD
        + data(b"\x03one\0\0\0", h2.PADDED)
        + h2.ping(bytes(8))
        + data(b"two" * 5000)
        + data(b"three")
        + block((b"trailer", b"1"), flags=h2.END_HEADERS | h2.END_STREAM)
    )

    async def main() -> None:
        rng = random.Random(1)
        for _ in range(100):
            peer = Peer()
            cuts = sorted(rng.randrange(len(sent)) for _ in range(rng.randrange(12)))
            for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
                await peer.receive(sent[start:end])
            assert (peer.reply.end, peer.reply.body) == ("end", b"one" + b"two" * 5000 + b"three")

    run(main)


def test_a_flood_of_large_frames_leaves_turns_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2_connection, "TURN_S", -1.0)

    async def main() -> None:
        peer = Peer()
        await peer.receive(HEAD)
        peer.connection.data_received(data(b"x" * 16_384) * 8)
        turns = 0
        while peer.connection._waits_for_turn:
            assert not peer.transport.reading
            await asyncio.sleep(0)
            turns += 1
        assert turns >= 8 * 4 - 1
        assert peer.reply.body == b"x" * (8 * 16_384)
        assert peer.transport.reading

    run(main)


def test_what_came_before_the_connection_was_lost_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2_connection, "TURN_S", -1.0)

    async def main() -> None:
        peer = Peer()
        peer.connection.data_received(HEAD + data(b"x" * 16_384) + data(b"", h2.END_STREAM))
        peer.connection.connection_lost(None)
        await peer.settle()
        assert (peer.reply.end, len(peer.reply.body)) == ("end", 16_384)

    run(main)


def test_a_server_that_says_something_else_first_does_not_speak_http2() -> None:
    async def main() -> None:
        for first in (h2.ping(bytes(8)), h2.SETTINGS_ACK, b"HTTP/1.1 200 OK\r\n\r\n", data(b"")):
            pool = ConnectionPool("http://127.0.0.1:1", Upstream(Timeouts(connect=1.0)))
            connection, transport = pool.make_http2(), FakeTransport()
            connection.connection_made(transport)
            connection.data_received(first)
            assert connection.ready.exception() is not None
            assert transport.closing

    run(main)
