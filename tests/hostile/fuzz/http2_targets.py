"""The server's HTTP/2 connection on a fake transport: bytes of any kind, and frames in any order."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from penstock.http.http2 import frames
from penstock.http.http2.faults import ErrorCode
from penstock.http.http2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    RST_STREAM,
)
from penstock.http.http2.header_blocks import encode_fields
from penstock.http.http2.stream import StreamPhase
from penstock.http.request import HttpRequest
from tests.hostile.fuzz.byte_source import ByteSource
from tests.hostile.fuzz.failures import logged
from tests.hostile.fuzz.http_targets import LOOP, received_body
from tests.http.http2.clients import GET, POST, TIMES, Client, Recorder, settle

BLOCKS = [
    encode_fields(GET),
    encode_fields(POST),
    encode_fields([*POST, (b"content-length", b"5")]),
    encode_fields([*GET, (b"te", b"gzip")]),
    encode_fields([(b"x", b"trailer")]),
    encode_fields([(b":method", b"HEAD"), *GET[1:]]),
    encode_fields([*POST, (b"expect", b"100-continue")]),
    b"\x82\x86\x84\x41\x01h\x40\x01n\x01v",
    b"\xff\xff",
]


class Application:
    """Answers at once, after the body, by events, or never, as the path of the request and the input say."""

    def __init__(self) -> None:
        self.requests: list[tuple[Any, ...]] = []
        self.sinks: list[Any] = []
        self.listeners: list[Recorder] = []

    async def __call__(self, http: HttpRequest) -> None:
        body = await received_body(http)
        if body is None:
            return
        self.requests.append((http.method, http.raw_path, tuple(http.headers), body))
        http.sink.release()
        if len(self.requests) % 2:
            await http.reply_json(b"x" * 100)
        else:
            self.listeners.append(Recorder())
            self.sinks.append(http.sink)
            http.sink.listen(self.listeners[-1])


async def _end(client: Client) -> None:
    """The client goes: nothing is left."""
    await settle()
    check_frames(client)
    client.connection.connection_lost(None)
    await settle()
    state = client.state
    assert state.budget.held == 0, state.budget.held
    assert not state.tasks, state.tasks
    assert not state.connections
    assert state.http2_streams == 0
    assert len(state.windows._free_streams) == len(state.windows.streams)
    assert not any(state.windows.writers)
    assert client.connection._abandoned == 0


def check_frames(client: Client) -> None:
    """What the server has written are frames in an order that a client accepts."""
    ended, block = set[int](), b""
    for kind, flags, stream_id, payload in client.received():
        assert kind not in (frames.PUSH_PROMISE, frames.PRIORITY), kind
        if kind in (DATA, HEADERS, CONTINUATION):
            assert stream_id not in ended, (kind, stream_id)
            if flags & END_STREAM and kind != CONTINUATION:
                ended.add(stream_id)
        if kind in (HEADERS, CONTINUATION):
            block += payload
            if flags & END_HEADERS:
                client.decoder.decode(block, raw=True)
                block = b""
        elif kind == RST_STREAM and payload[-1]:
            ended.add(stream_id)
        elif kind == GOAWAY:
            assert payload[7] != ErrorCode.INTERNAL_ERROR, payload


async def _serve(pieces: list[bytes]) -> Application:
    app = Application()
    client = Client(app)
    for piece in pieces:
        client.send(piece)
        await settle()
    await _end(client)
    return app


def http2_bytes(data: bytes) -> None:
    """Bytes behind the preface. However they are cut, the application sees the same requests; if the
    connection breaks, a piece that comes earlier may have been answered."""
    source = ByteSource(data)
    cut_at, stream = source.take(8), source.rest()
    with logged("penstock.http.http2.connection", "penstock.http.http2.stream", "asyncio") as failures:
        whole = LOOP.run_until_complete(_serve([stream]))
        cut = LOOP.run_until_complete(_serve(ByteSource(cut_at).pieces(stream, 3)))
    assert not failures, failures
    assert Counter(whole.requests) <= Counter(cut.requests), (whole.requests, cut.requests)


def http2_frames(data: bytes) -> None:
    """Frames, replies and time in any order. Windows are kept, and nothing is left when the client goes."""
    with logged("penstock.http.http2.connection", "penstock.http.http2.stream", "asyncio") as failures:
        LOOP.run_until_complete(_act(ByteSource(data)))
    assert not failures, failures


async def _act(source: ByteSource) -> None:
    app = Application()
    client = Client(app, INITIAL_WINDOW_SIZE=source.pick((0, 1, 50, 65_535)))
    transport, next_id, batch = client.transport, 1, b""
    while source and not transport.end:
        stream_id = source.below(2 * next_id + 2) if source.flag() else next_id
        match source.below(10):
            case 0 | 1:
                flags = source.pick((END_HEADERS | END_STREAM, END_HEADERS, END_STREAM, 0, source.byte()))
                batch += frames.frame(HEADERS, flags, stream_id, source.pick(BLOCKS))
                next_id = max(next_id, stream_id + 2 | 1)
            case 2:
                size = source.pick((0, 1, 5, 1000, 16_384))
                batch += frames.frame(DATA, source.below(2), stream_id, b"x" * size)
            case 3:
                increment = source.pick((0, 1, 100, 65_535, 2**31 - 1))
                batch += frames.window_update(source.pick((0, stream_id)), increment)
            case 4:
                batch += frames.rst_stream(stream_id, 8)
            case 5:
                value = source.pick((0, 1, 100, 65_535, 20_000, 2**31 - 1))
                batch += frames.settings_frame({source.below(8): value})
            case 6:
                kind, flags = source.below(12), source.byte()
                batch += frames.frame(kind, flags, source.pick((0, stream_id)), source.take(source.below(12)))
            case 7 if app.sinks:
                _reply(source, source.pick(app.sinks))
            case 8:
                client.connection.cut_if_slow(
                    client.connection.core.now + source.pick((0.0, 20.0, 80.0)), *TIMES
                )
            case 9:
                transport.stalled = not transport.stalled
                if not transport.stalled:
                    transport.drain()
                if source.below(16) == 0:
                    client.connection.shutdown()
        if source.flag():
            client.send(batch)
            batch = b""
            assert client.state.windows.connections.item(client.connection.sender.slot) >= 0
            await asyncio.sleep(0)
    client.send(batch)
    await _end(client)
    for listener in app.listeners:
        ends = listener.told.count("disconnect")
        assert ends <= 1, listener.told
        states = [told for told in listener.told if told != "disconnect"]
        assert states == ["pause", "resume"] * (len(states) // 2) + ["pause"] * (len(states) % 2), (
            listener.told
        )


def _reply(source: ByteSource, sink: Any) -> None:
    if sink.phase >= StreamPhase.ENDING:
        return
    match source.below(4):
        case 0:
            sink.send(b"e" * source.pick((1, 100, 20_000)), last=source.flag())
        case 1 if sink.request.started:
            sink.write(b"w" * source.pick((0, 1, 100, 20_000)))
        case 2:
            sink.cut()
        case _:
            assert (sink.write_target is None) == bool(sink.held or sink._sender.paused)
