"""The public lists of attacks on HTTP/2 (2019: CVE-2019-9511 to -9518; CVE-2023-44487; CONTINUATION floods of
2024; CVE-2025-8671): each is bounded, and a busy client is not mistaken for one."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from penstock.http.http2 import connection as module
from penstock.http.http2 import frames
from penstock.http.http2.faults import ErrorCode
from penstock.http.http2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    GOAWAY,
    HEADERS,
    PRIORITY,
    frame,
    ping,
    rst_stream,
    settings_frame,
    window_update,
)
from penstock.http.http2.header_blocks import encode_fields
from penstock.http.http2.rates import CONTROL_BURST, RESET_BURST
from penstock.http.http2.roles import HEADER_BYTES_PER_CONTROL, MAX_STREAMS
from penstock.http.http2.stream import Http2Stream
from penstock.http.request import ClientGone, HttpRequest
from penstock.http.server_state import Limits, ServerState
from tests.http.http2.clients import GET, POST, Client, Streaming, in_loop, settle

CALM = ErrorCode.ENHANCE_YOUR_CALM

FLOODS: dict[str, bytes] = {
    "PING (CVE-2019-9512)": ping(b"12345678"),
    "SETTINGS (CVE-2019-9515)": settings_frame({frames.INITIAL_WINDOW_SIZE: 5}),
    "empty SETTINGS": settings_frame({}),
    "acknowledged SETTINGS": frames.SETTINGS_ACK,
    "PRIORITY (CVE-2019-9513)": frame(PRIORITY, 0, 99, b"\0\0\0\3\0"),
    "WINDOW_UPDATE of the connection": window_update(0, 1),
    "WINDOW_UPDATE of a stream": window_update(1, 1),
    "WINDOW_UPDATE of a closed stream": window_update(3, 1),
    "RST_STREAM of a closed stream": rst_stream(3, 8),
    "empty DATA (CVE-2019-9518)": frame(DATA, 0, 1),
    "DATA of a byte": frame(DATA, 0, 1, b"x"),
    "DATA of padding alone": frame(DATA, frames.PADDED, 1, b"\1\0"),
    "unknown frames": frame(0x77, 0, 0, b"x"),
    "GOAWAY": frames.goaway(0, 0),
}


async def until_over(client: Client) -> None:
    """Everything that was sent is handled."""
    while client.connection._read_on:
        await settle()


async def wait(http: HttpRequest) -> None:
    with suppress(ClientGone):
        while await http.read_part():
            pass
        await http.gone()


@pytest.mark.parametrize("flood", FLOODS)
@in_loop
async def test_frames_that_carry_nothing_end_the_connection_when_there_are_too_many(flood: str) -> None:
    client = Client(wait)
    client.send(client.headers(1, POST, end=False) + client.headers(3) + rst_stream(3, 8))
    client.send(FLOODS[flood] * (CONTROL_BURST - 100))
    await until_over(client)
    assert GOAWAY not in {each[0] for each in client.received()}
    client.send(FLOODS[flood] * 3000)
    await until_over(client)
    assert await client.goaway() == (CALM, "too many control frames and empty frames")


@in_loop
async def test_updates_in_proportion_to_events_are_no_flood() -> None:
    """Some clients send two WINDOW_UPDATE frames for every event of 100 bytes or more."""
    app = Streaming()
    client = Client(app)
    client.send(client.headers(1))
    for _ in range(2 * CONTROL_BURST):
        app.sinks[0].send(b"x" * 91, last=False)
        client.connection.sender.flush()
        client.send(window_update(0, 91) + window_update(1, 91))
    assert GOAWAY not in {each[0] for each in await client.frames()}


@in_loop
async def test_updates_may_come_long_after_their_events() -> None:
    """A client that lags behind, by what its socket holds, sends its updates when the server has sent all."""
    app = Streaming()
    client = Client(app, INITIAL_WINDOW_SIZE=2**31 - 1)
    client.send(client.headers(1) + window_update(0, 2**30))
    for _ in range(3 * CONTROL_BURST):
        app.sinks[0].send(b"x" * 91, last=False)
        client.connection.sender.flush()
    for _ in range(2 * 3):
        client.send(window_update(0, 91) * CONTROL_BURST)
        await until_over(client)
    assert GOAWAY not in {each[0] for each in client.received()}
    client.send(window_update(0, 1) * (6 * CONTROL_BURST))
    await until_over(client)
    assert await client.goaway() == (CALM, "too many control frames and empty frames")


def provoke_by_window(stream_id: int) -> bytes:
    return window_update(stream_id, 0)


def provoke_by_data(stream_id: int) -> bytes:
    return frame(DATA, 0, stream_id, b"x")


@pytest.mark.parametrize(
    "end",
    [
        lambda stream_id: rst_stream(stream_id, 8),  # rapid reset, CVE-2023-44487
        lambda stream_id: window_update(stream_id, 0),  # resets that the server makes, CVE-2025-8671
        lambda stream_id: window_update(stream_id, 2**31 - 1),
        lambda stream_id: frame(DATA, 0, stream_id, b"x" * 100),
    ],
)
@in_loop
async def test_rapid_resets_end_the_connection(end: Callable[[int], bytes]) -> None:
    started = 0

    async def app(http: HttpRequest) -> None:
        nonlocal started
        started += 1
        await wait(http)

    client = Client(app)
    client.send(b"".join(client.headers(2 * n + 1) + end(2 * n + 1) for n in range(RESET_BURST + 1000)))
    await until_over(client)
    assert await client.goaway() == (CALM, "too many streams that are reset before their end")
    assert RESET_BURST <= started <= RESET_BURST + 200
    assert not client.state.tasks
    assert client.connection._abandoned == 0


@in_loop
async def test_rapid_resets_of_unfinished_requests_end_the_connection() -> None:
    """Each reaches the application, which has nothing to do."""
    told = []

    async def app(http: HttpRequest) -> None:
        try:
            await http.read_part()
        except ClientGone:
            told.append(http.path)

    client = Client(app)
    numbers = range(1, 2 * (RESET_BURST + 1000), 2)
    client.send(b"".join(client.headers(n, POST, end=False) + rst_stream(n, 8) for n in numbers))
    await until_over(client)
    assert await client.goaway() == (CALM, "too many streams that are reset before their end")
    assert RESET_BURST <= len(told) <= RESET_BURST + 200
    assert not client.state.tasks
    assert client.connection._abandoned == 0


@in_loop
async def test_a_gateway_whose_clients_cancel_is_no_attacker() -> None:
    async def app(http: HttpRequest) -> None:
        await (wait(http) if http.path == "/wait" else http.reply_json(b"{}"))

    client = Client(app)
    hangs = [*GET[:2], (b":path", b"/wait"), GET[3]]
    for n in range(2 * RESET_BURST):
        client.send(client.headers(4 * n + 1) + client.headers(4 * n + 3, hangs) + rst_stream(4 * n + 3, 8))
        if n % 100 == 0:
            await settle()
    await until_over(client)
    assert GOAWAY not in {each[0] for each in await client.frames()}


@in_loop
async def test_work_that_outlives_its_stream_counts_as_a_stream() -> None:
    finish = asyncio.Event()

    async def app(http: HttpRequest) -> None:
        await finish.wait()

    client = Client(app)
    for n in range(MAX_STREAMS):
        client.send(client.headers(2 * n + 1))
        if n % 2:
            client.send(rst_stream(2 * n + 1, 8))
    client.send(client.headers(9001))
    assert await client.resets() == {9001: ErrorCode.REFUSED_STREAM}
    finish.set()
    await settle()
    client.received()
    client.send(client.headers(9003))
    assert await client.resets() != {9003: ErrorCode.REFUSED_STREAM}


@in_loop
async def test_streams_of_all_connections_are_as_many_as_connections_may_be() -> None:
    state = ServerState(limits=Limits(max_connections=10))
    clients = [Client(Streaming(), state) for _ in range(2)]
    for client in clients:
        client.send(b"".join(client.headers(2 * n + 1) for n in range(5)))
        assert await client.frames() == []
    clients[0].send(clients[0].headers(11))
    headers, body = await clients[0].reply(11)
    assert (headers[b":status"], b"too_many_connections" in body) == (b"503", True)
    for client in clients:
        client.connection.connection_lost(None)
    assert state.http2_streams == 0


@in_loop
async def test_connections_beyond_the_limit_are_told_so_in_a_reply() -> None:
    refused = []
    state = ServerState(limits=Limits(max_connections=1, max_lingering=1), on_refusal=refused.append)
    first, second, third = (Client(state=state) for _ in range(3))
    assert third.transport.written.endswith(b"Too many connections to this server."), "more than may linger"
    second.send(second.headers(1) + second.headers(3, POST, end=False))
    received = await second.frames()
    heads = [dict(second.decoder.decode(each[3], raw=True)) for each in received if each[0] == HEADERS]
    assert [head[b":status"] for head in heads] == [b"503", b"503"]
    assert {error.code for error in refused} == {"too_many_connections"}
    assert received[-1][:3] == (GOAWAY, 0, 0)
    assert frames.unpack_goaway(received[-1][3])[:2] == (3, ErrorCode.NO_ERROR)
    first.send(first.headers(1))
    assert (await first.reply())[0][b":status"] == b"200"
    for client in (first, second, third):
        client.connection.connection_lost(None)


@in_loop
async def test_a_connection_beyond_the_limit_that_asks_for_nothing_is_closed() -> None:
    state = ServerState(limits=Limits(max_connections=0))
    client = Client(state=state)
    client.connection.idle_since -= 1.5
    client.connection.cut_if_slow(client.connection.core.now + 1.5, 30.0, 75.0)
    client.connection._say_last()
    assert [each[0] for each in await client.frames()][-1] == GOAWAY
    assert client.transport.end == "close"


@in_loop
async def test_a_continuation_flood_is_bounded_by_bytes_and_by_frames() -> None:
    client = Client()
    client.send(frame(HEADERS, 0, 1, encode_fields(GET)))
    for _ in range(9):
        client.send(frame(CONTINUATION, 0, 1, b"\0\1x\0" * 4000))
    assert await client.goaway() == (CALM, "a header block is too large")
    client = Client()
    client.send(frame(HEADERS, 0, 1, encode_fields(GET)) + frame(CONTINUATION, 0, 1) * (CONTROL_BURST + 3000))
    await until_over(client)
    assert (await client.goaway())[0] is CALM
    assert client.state.budget.held == 0


@in_loop
async def test_header_bombs_are_refused() -> None:
    """One entry of 4 KB that a block names a thousand times; names that grow the table for ever."""
    client = Client()
    bomb = b"\x40\x01x\x7f\xa1\x1e" + b"v" * 4000
    client.send(frame(HEADERS, END_HEADERS | frames.END_STREAM, 1, encode_fields(GET) + bomb + b"\xbe" * 900))
    [headers, _] = await client.frames()
    assert b"431" in headers[3]
    client.send(frame(HEADERS, END_HEADERS | frames.END_STREAM, 3, encode_fields(GET) + b"\xbe" * 16_000))
    assert await client.goaway() == (CALM, "a header block has too many fields")
    client = Client()
    for n in range(1, 200, 2):
        block = client.encoder.encode([*GET, (b"x-%d" % n, b"v" * 3000)], huffman=False)
        client.send(frame(HEADERS, END_HEADERS | frames.END_STREAM, n, block))
    assert sum(size for _, size in client.connection.core._decoder._entries) <= 4096


@in_loop
async def test_large_header_blocks_are_rare() -> None:
    """Huffman's code takes 0.3 microseconds per byte: blocks of the maximum size would take all the time."""
    client = Client(wait)
    block = client.encoder.encode([*GET, *[(b"x-%d" % n, b"v" * 800) for n in range(20)]])
    client.send(frame(HEADERS, END_HEADERS | frames.END_STREAM, 1, block))
    per_block = len(block) // HEADER_BYTES_PER_CONTROL
    for n in range(1, 3 * CONTROL_BURST // per_block):
        client.send(
            frame(HEADERS, END_HEADERS | frames.END_STREAM, 2 * n + 1, block) + rst_stream(2 * n + 1, 8)
        )
        if client.transport.end:
            break
    assert (await client.goaway())[0] is CALM
    assert CONTROL_BURST / per_block - 1 <= n < 2 * CONTROL_BURST / per_block


@in_loop
async def test_settings_that_change_many_windows_are_rare() -> None:
    """Each takes as long as the connection has streams."""
    client = Client(Streaming())
    client.send(b"".join(client.headers(2 * n + 1) for n in range(1000)))
    await until_over(client)
    change = b"".join(settings_frame({frames.INITIAL_WINDOW_SIZE: size}) for size in (65_536, 65_537))
    client.send(change * 20)
    assert GOAWAY not in {each[0] for each in client.received()}
    client.send(change * 200)
    await until_over(client)
    assert (await client.goaway())[0] is CALM


@in_loop
async def test_partial_headers_count_as_held_bytes() -> None:
    state = ServerState(limits=Limits(max_held_bytes=50_000))
    clients = [Client(state=state) for _ in range(5)]
    for size, client in enumerate(clients):
        client.send(
            frame(HEADERS, 0, 1, b"\0\1x\0" * 3000)
            + frames.frame_header(9000, CONTINUATION, 0, 1)
            + b"x" * size
        )
    assert state.budget.held <= 50_000
    assert [client.transport.end for client in clients] == ["", "", "", "", "eof"]


@in_loop
async def test_replies_to_a_client_without_windows_are_bounded_and_cut() -> None:
    """CVE-2019-9511 and -9517: many requests for large replies, and windows that hardly open."""

    async def app(http: HttpRequest) -> None:
        await http.reply_json(b"x" * 100_000)

    client = Client(app, INITIAL_WINDOW_SIZE=0)
    for n in range(50):
        client.send(client.headers(2 * n + 1))
    assert sum(len(each[3]) for each in await client.frames() if each[0] == DATA) == 0
    for now in (10.0, 60.0):
        client.connection.cut_if_slow(client.connection.core.now + now, 30.0, 75.0)
    client.send(window_update(1, 1) + window_update(3, 1))
    received = await client.frames()
    assert [each[3] for each in received if each[0] == DATA] == [b"x", b"x"]
    at = client.connection.core.now
    client.connection.cut_if_slow(at + 70.0, 30.0, 75.0)
    assert await client.resets() == {}
    client.connection.cut_if_slow(at + 76.0, 30.0, 75.0)
    assert set(await client.resets()) == set(range(1, 100, 2))
    assert client.connection.streams == {}


@in_loop
async def test_a_window_of_a_byte_does_one_byte_of_work_for_each_update() -> None:
    app = Streaming()
    client = Client(app, INITIAL_WINDOW_SIZE=1)
    client.send(client.headers(1) + client.headers(3))
    client.send(window_update(3, 1000))
    for sink in app.sinks:
        sink.send(b"data: x\n\n", last=False)
    received = await client.frames()
    assert [(each[2], each[3]) for each in received if each[0] == DATA] == [(1, b"d"), (3, b"data: x\n\n")]
    assert [listener.told for listener in app.listeners] == [["pause"], []]
    assert app.sinks[0].unread() == 8
    assert app.sinks[0].write_target is None
    assert app.sinks[1].write_target is not None
    client.send(window_update(1, 1) * 7)
    assert app.listeners[0].told == ["pause"]
    client.send(window_update(1, 1))
    assert app.listeners[0].told == ["pause", "resume"]
    assert b"".join(each[3] for each in await client.frames()) == b"ata: x\n\n"


@in_loop
async def test_a_read_of_many_frames_takes_turns_with_the_event_loop(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "TURN_S", -1.0)
    client = Client()
    client.send(b"".join(client.headers(2 * n + 1) for n in range(100)))
    assert len([each for each in client.received() if each[0] == HEADERS]) == 32
    assert not client.transport.reading
    assert len([each for each in await client.frames() if each[0] == HEADERS]) == 68
    assert client.transport.reading


@in_loop
async def test_a_lost_connection_ends_its_streams_in_turns() -> None:
    app = Streaming()
    client = Client(app)
    client.send(b"".join(client.headers(2 * n + 1) for n in range(300)))
    await until_over(client)
    client.connection.connection_lost(None)
    assert sum(bool(listener.told) for listener in app.listeners) == module.LOST_PER_TURN
    app.sinks[0].write(b"late")
    await settle()
    assert all(listener.told == ["disconnect"] for listener in app.listeners)
    windows = client.state.windows
    assert windows.writers == [None] * len(windows.writers)
    assert len(windows._free_streams) == len(windows.streams)


@in_loop
async def test_streams_leave_nothing_to_the_garbage_collector() -> None:
    async def app(http: HttpRequest) -> None:
        await (http.reply_json(b"{}") if http.method == "GET" else wait(http))

    client = Client(app)
    gc.collect()
    gc.disable()
    try:
        for n in range(0, 100, 2):
            client.send(client.headers(2 * n + 1) + client.headers(2 * n + 3, POST, end=False))
            await asyncio.sleep(0)
            client.send(rst_stream(2 * n + 3, 8))
        await settle()
        kept = gc.get_objects()
        left = [each for each in kept if type(each) is Http2Stream]
        left += [each for each in kept if type(each) is HttpRequest and type(each.sink) is Http2Stream]
    finally:
        gc.enable()
    assert not left
