"""What breaks the protocol, and the error code that says so: the cases of h2spec, and more."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.http.http2 import frames
from penstock.http.http2.connection import Http2Connection
from penstock.http.http2.faults import ErrorCode
from penstock.http.http2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PRIORITY_FLAG,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    rst_stream,
    settings_frame,
    window_update,
)
from penstock.http.http2.header_blocks import encode_fields
from penstock.http.http2.roles import CONNECTION_WINDOW, STREAM_WINDOW
from penstock.http.server_state import ServerState
from tests.http.http2.clients import GET, POST, Client, Streaming, Transport, answer, in_loop

FLOW, SIZE = ErrorCode.FLOW_CONTROL_ERROR, ErrorCode.FRAME_SIZE_ERROR
PROTOCOL, CLOSED, COMPRESSION = (
    ErrorCode.PROTOCOL_ERROR,
    ErrorCode.STREAM_CLOSED,
    ErrorCode.COMPRESSION_ERROR,
)
BLOCK = encode_fields(GET)
PRIORITY_OF_1 = (1).to_bytes(4, "big") + b"\x10"

Bytes = Callable[[Client], bytes]

OF_CONNECTION: dict[str, tuple[Bytes, ErrorCode]] = {
    # 3.4, 6.5: the preface ends with SETTINGS; tested below, too
    "frame too large": (lambda c: frames.frame_header(16_385, DATA, 0, 1), SIZE),
    # 4.3, 6.2, 6.10: header blocks are not interrupted
    "other frame within a block": (
        lambda c: frame(HEADERS, 0, 1, BLOCK) + frames.ping(b"12345678"),
        PROTOCOL,
    ),
    "unknown frame within a block": (
        lambda c: frame(HEADERS, 0, 1, BLOCK) + frame(0x16, 0, 1, b""),
        PROTOCOL,
    ),
    "headers of another stream within a block": (
        lambda c: frame(HEADERS, 0, 1, BLOCK) + frame(HEADERS, END_HEADERS, 3, BLOCK),
        PROTOCOL,
    ),
    "continuation of another stream": (
        lambda c: frame(HEADERS, 0, 1, BLOCK[:2]) + frame(CONTINUATION, END_HEADERS, 3, BLOCK[2:]),
        PROTOCOL,
    ),
    "continuation without headers": (lambda c: frame(CONTINUATION, END_HEADERS, 1, BLOCK), PROTOCOL),
    "continuation after the end of a block": (
        lambda c: c.headers(1) + frame(CONTINUATION, END_HEADERS, 1, BLOCK),
        PROTOCOL,
    ),
    "block that is not HPACK": (
        lambda c: frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff"),
        COMPRESSION,
    ),
    # 5.1: idle streams
    "DATA on an idle stream": (lambda c: frame(DATA, END_STREAM, 1, b"x"), PROTOCOL),
    "RST_STREAM on an idle stream": (lambda c: rst_stream(1, 8), PROTOCOL),
    "WINDOW_UPDATE on an idle stream": (lambda c: window_update(1, 5), PROTOCOL),
    # 5.1.1: stream ids are odd and rise
    "HEADERS on an even stream": (lambda c: c.headers(2), PROTOCOL),
    "HEADERS on an earlier stream": (lambda c: c.headers(5) + c.headers(3), PROTOCOL),
    "HEADERS on a closed stream": (lambda c: c.headers(1) + rst_stream(1, 8) + c.headers(1), CLOSED),
    # streams where none may be, and none where one must
    "DATA on stream 0": (lambda c: frame(DATA, 0, 0, b"x"), PROTOCOL),
    "HEADERS on stream 0": (lambda c: frame(HEADERS, END_HEADERS, 0, BLOCK), PROTOCOL),
    "PRIORITY on stream 0": (lambda c: frame(PRIORITY, 0, 0, PRIORITY_OF_1), PROTOCOL),
    "RST_STREAM on stream 0": (lambda c: rst_stream(0, 8), PROTOCOL),
    "SETTINGS on a stream": (lambda c: frame(SETTINGS, 0, 1, b""), PROTOCOL),
    "PING on a stream": (lambda c: frame(PING, 0, 1, b"12345678"), PROTOCOL),
    "GOAWAY on a stream": (lambda c: frame(GOAWAY, 0, 1, b"12345678"), PROTOCOL),
    "CONTINUATION on stream 0": (lambda c: frame(CONTINUATION, END_HEADERS, 0, b""), PROTOCOL),
    # 6.1, 6.2: padding
    "DATA with too much padding": (
        lambda c: c.headers(1, POST, end=False) + frame(DATA, PADDED, 1, b"\2x"),
        PROTOCOL,
    ),
    "DATA without the length of its padding": (
        lambda c: c.headers(1, POST, end=False) + frame(DATA, PADDED, 1, b""),
        SIZE,
    ),
    "HEADERS with too much padding": (lambda c: frame(HEADERS, PADDED | END_HEADERS, 1, b"\xffx"), PROTOCOL),
    # 5.3: priorities
    "HEADERS too short for a priority": (lambda c: frame(HEADERS, PRIORITY_FLAG, 1, b"123"), SIZE),
    "HEADERS that depend on themselves": (
        lambda c: frame(HEADERS, PRIORITY_FLAG | END_HEADERS | END_STREAM, 1, PRIORITY_OF_1 + BLOCK),
        PROTOCOL,
    ),
    "PRIORITY that depends on itself": (lambda c: frame(PRIORITY, 0, 1, PRIORITY_OF_1), PROTOCOL),
    # lengths
    "PRIORITY of 4 bytes": (lambda c: frame(PRIORITY, 0, 1, b"1234"), SIZE),
    "RST_STREAM of 3 bytes": (lambda c: c.headers(1, end=False) + frame(RST_STREAM, 0, 1, b"123"), SIZE),
    "SETTINGS of 5 bytes": (lambda c: frame(SETTINGS, 0, 0, b"12345"), SIZE),
    "SETTINGS with ACK and settings": (lambda c: frame(SETTINGS, frames.ACK, 0, b"123456"), SIZE),
    "PING of 6 bytes": (lambda c: frame(PING, 0, 0, b"123456"), SIZE),
    "GOAWAY of 7 bytes": (lambda c: frame(GOAWAY, 0, 0, b"1234567"), SIZE),
    "WINDOW_UPDATE of 3 bytes": (lambda c: frame(WINDOW_UPDATE, 0, 0, b"123"), SIZE),
    # 6.5.2: values of settings
    "ENABLE_PUSH 2": (lambda c: settings_frame({frames.ENABLE_PUSH: 2}), PROTOCOL),
    "INITIAL_WINDOW_SIZE 2^31": (lambda c: settings_frame({frames.INITIAL_WINDOW_SIZE: 2**31}), FLOW),
    "MAX_FRAME_SIZE 16383": (lambda c: settings_frame({frames.MAX_FRAME_SIZE: 16_383}), PROTOCOL),
    "MAX_FRAME_SIZE 2^24": (lambda c: settings_frame({frames.MAX_FRAME_SIZE: 2**24}), PROTOCOL),
    # 6.9: windows
    "WINDOW_UPDATE by 0": (lambda c: window_update(0, 0), PROTOCOL),
    "WINDOW_UPDATE beyond the maximum": (lambda c: window_update(0, 2**31 - 1), FLOW),
    "SETTINGS that raise a window beyond the maximum": (
        lambda c: (
            c.headers(1, POST, end=False)
            + window_update(1, 2**31 - 1 - 65_535)
            + settings_frame({frames.INITIAL_WINDOW_SIZE: 65_536})
        ),
        FLOW,
    ),
    # 6.6, 8.4
    "PUSH_PROMISE": (lambda c: frame(PUSH_PROMISE, END_HEADERS, 1, (2).to_bytes(4, "big")), PROTOCOL),
}

OF_STREAM: dict[str, tuple[Bytes, ErrorCode]] = {
    "DATA after END_STREAM": (lambda c: c.headers(1, GET) + frame(DATA, END_STREAM, 1, b"x"), CLOSED),
    "HEADERS after END_STREAM": (lambda c: c.headers(1, GET) + c.headers(1, GET), CLOSED),
    "DATA after RST_STREAM": (lambda c: c.headers(1) + rst_stream(1, 8) + frame(DATA, 0, 1, b"x"), CLOSED),
    "HEADERS within a body": (
        lambda c: c.headers(1, POST, end=False) + c.headers(1, [(b"x", b"y")], end=False),
        PROTOCOL,
    ),
    "pseudo-header fields in trailers": (
        lambda c: c.headers(1, POST, end=False) + c.headers(1, GET),
        PROTOCOL,
    ),
    "malformed trailers": (
        lambda c: c.headers(1, POST, end=False) + c.headers(1, [(b"X", b"y")]),
        PROTOCOL,
    ),
    "WINDOW_UPDATE by 0": (lambda c: c.headers(1) + window_update(1, 0), PROTOCOL),
    "WINDOW_UPDATE beyond the maximum": (lambda c: c.headers(1) + window_update(1, 2**31 - 1), FLOW),
    "DATA beyond the window": (
        lambda c: (
            c.headers(1, POST, end=False) + frame(DATA, 0, 1, b"x" * 16_384) * (STREAM_WINDOW // 16_384 + 1)
        ),
        FLOW,
    ),
}


@pytest.mark.parametrize("case", OF_CONNECTION)
@in_loop
async def test_a_fault_of_the_connection_ends_it_and_its_streams(case: str) -> None:
    data, code = OF_CONNECTION[case]
    app = Streaming()
    client = Client(app)
    client.send(data(client))
    found, reason = await client.goaway()
    assert found is code, reason
    assert reason
    assert all(listener.told == ["disconnect"] for listener in app.listeners)
    client.send(client.headers(101))  # nothing is handled any more
    assert await client.frames() == []


@pytest.mark.parametrize("case", OF_STREAM)
@in_loop
async def test_a_fault_of_a_stream_ends_it_alone(case: str) -> None:
    data, code = OF_STREAM[case]
    app = Streaming()
    client = Client(app)
    client.send(data(client))
    client.send(client.headers(7))
    assert await client.resets() == {1: code}
    *ended, other = [listener.told for listener in app.listeners]
    assert ended in ([], [["disconnect"]])  # a request that ends before its body comes is not given out
    assert other == []
    app.sinks[-1].send(b"on", last=True)
    assert (await client.reply(7))[1] == b"on"


@in_loop
async def test_data_beyond_the_window_of_the_connection_ends_it() -> None:
    client = Client(Streaming())
    client.connection.core.receive_window = 20_000  # as if WINDOW_UPDATE were on its way
    client.send(client.headers(1, POST, end=False) + frame(DATA, 0, 1, b"x" * 16_384))
    assert [each[0] for each in await client.frames()] == [WINDOW_UPDATE]
    assert client.connection.core.receive_window == CONNECTION_WINDOW
    client.connection.core.receive_window = 10_000
    client.send(frame(DATA, 0, 1, b"x" * 16_384))
    assert (await client.goaway())[0] is FLOW


@pytest.mark.parametrize(
    "start",
    [
        PREFACE[:-1] + b"!" + settings_frame({}),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        PREFACE + frames.ping(b"12345678"),
        PREFACE + frames.SETTINGS_ACK,
    ],
)
@in_loop
async def test_a_connection_begins_with_the_preface_and_settings(start: bytes) -> None:
    transport = Transport()
    transport.protocol = connection = Http2Connection(answer, ServerState())
    connection.connection_made(transport)
    for index in range(len(start)):
        if not transport.end:
            connection.data_received(start[index : index + 1])
    assert transport.end == "eof"
    assert frames.goaway(0, PROTOCOL)[9:] in transport.written


@in_loop
async def test_what_is_unknown_or_late_is_ignored() -> None:
    client = Client()
    client.send(settings_frame({0x99: 5, frames.ENABLE_PUSH: 1, frames.MAX_FRAME_SIZE: 2**24 - 1}))
    assert await client.frames() == [(SETTINGS, frames.ACK, 0, b"")]
    client.send(
        frame(0x16, 0xFF, 0, b"unknown")
        + frame(PING, 0xFE & ~frames.ACK, 0, b"12345678")
        + frame(PRIORITY, 0, 9, PRIORITY_OF_1)
        + frame(
            HEADERS, PADDED | PRIORITY_FLAG | END_HEADERS | END_STREAM, 1, b"\2\0\0\0\0\0" + BLOCK + b"\0\0"
        )
    )
    received = await client.frames()
    assert [each[0] for each in received] == [PING, HEADERS, DATA]
    assert received[0][3] == b"12345678"
    client.send(window_update(1, 0) + rst_stream(1, 8) + frame(PRIORITY, 0, 1, b"\0\0\0\0\0"))
    assert await client.frames() == []
    client.send(client.headers(3))
    assert (await client.reply(3))[0][b":status"] == b"200"
