"""Requests over HTTP/2 and their replies: what the application gets and the client reads."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.http.errors import ApiError
from penstock.http.http2 import frames
from penstock.http.http2.faults import ErrorCode
from penstock.http.http2.frames import DATA, END_STREAM, HEADERS, RST_STREAM, WINDOW_UPDATE, frame
from penstock.http.http2.header_blocks import encode_fields
from penstock.http.http2.roles import STREAM_WINDOW
from penstock.http.request import ClientGone, HttpRequest
from penstock.http.server_state import LINGER_S, Limits, ServerState
from tests.http.http2.clients import GET, POST, TIMES, Client, Recorder, Streaming, in_loop


async def echo(http: HttpRequest) -> None:
    body = await http.read_body(100_000_000, lambda limit: ApiError(413, "too large"))
    http.sink.release()
    await http.reply_json(body)


@in_loop
async def test_a_request_is_one_as_of_http1_and_its_reply_one_write() -> None:
    requests = []

    async def app(http: HttpRequest) -> None:
        requests.append(http)
        assert await http.read_part() == b""
        await http.reply_json(b"{}", headers=[(b"X-Upper", b" v "), (b"Connection", b"close")])

    client = Client(app)
    path = (b":path", b"/a%20b?q=1")
    client.send(client.headers(1, [*GET[:2], path, GET[3], (b"x-one", b"1"), (b"te", b"trailers")]))
    headers, body = await client.reply()
    assert (headers.pop(b"date"), headers, body) == (
        client.state.date,
        {
            b":status": b"200",
            b"content-type": b"application/json",
            b"content-length": b"2",
            b"x-upper": b"v",
        },
        b"{}",
    )
    [request] = requests
    assert (request.version, request.client, request.method) == ("2", None, "GET")
    assert (request.path, request.raw_path, request.query) == ("/a b", b"/a%20b", b"q=1")
    assert request.headers == [(b"host", b"h"), (b"x-one", b"1"), (b"te", b"trailers")]
    assert request.fields == dict(request.headers)


@in_loop
async def test_requests_of_one_read_are_answered_by_one_write_without_a_task() -> None:
    client = Client(echo)
    writes = []
    client.transport.write = writes.append  # type: ignore[method-assign]
    data = b"".join(
        client.headers(stream_id, POST, end=False) + frame(DATA, END_STREAM, stream_id, b"%d" % stream_id)
        for stream_id in range(1, 21, 2)
    )
    client.send(data)
    assert len(writes) == 1
    assert not client.state.tasks
    assert client.state.budget.held == 0


@in_loop
async def test_a_body_comes_in_pieces_and_its_window_opens_as_it_is_received() -> None:
    client = Client(echo)
    size = 3 * STREAM_WINDOW
    client.send(client.headers(1, [*POST, (b"content-length", b"%d" % size)], end=False))
    sent = stream_room = connection_room = 0
    stream_room, connection_room = STREAM_WINDOW, 1024 * 1024
    reply = []
    while sent < size:
        piece = min(16_384, size - sent, stream_room, connection_room)
        assert piece, "the window does not open"
        sent, stream_room, connection_room = sent + piece, stream_room - piece, connection_room - piece
        client.send(frame(DATA, END_STREAM if sent == size else 0, 1, b"x" * piece))
        for each in await client.frames():
            if each[0] == WINDOW_UPDATE and each[2]:
                stream_room += int.from_bytes(each[3], "big")
            elif each[0] == WINDOW_UPDATE:
                connection_room += int.from_bytes(each[3], "big")
            else:
                reply.append(each)
    assert [each[0] for each in reply][:2] == [HEADERS, DATA]
    assert client.state.budget.held == 0


@in_loop
async def test_padding_counts_for_windows_and_is_no_content() -> None:
    client = Client(echo)
    client.send(
        client.headers(1, POST, end=False)
        + frame(DATA, frames.PADDED, 1, b"\5ab\0\0\0\0\0")
        + frame(DATA, frames.PADDED | END_STREAM, 1, b"\0c")
    )
    assert (await client.reply())[1] == b"abc"


@in_loop
async def test_trailers_end_a_body_and_are_dropped() -> None:
    client = Client(echo)
    client.send(client.headers(1, POST, end=False) + frame(DATA, 0, 1, b"body"))
    client.send(client.headers(1, [(b"x-checksum", b"1")]))
    assert (await client.reply())[1] == b"body"


@in_loop
async def test_a_header_block_in_pieces_is_one() -> None:
    client = Client()
    block = encode_fields([*GET, (b"x", b"v" * 30_000)])
    client.send(frames.header_frames(1, block, end_stream=True, max_frame_size=16_384))
    assert (await client.reply())[0][b":status"] == b"200"


@in_loop
async def test_cookies_are_joined_and_host_may_stand_for_authority() -> None:
    seen = []

    async def app(http: HttpRequest) -> None:
        seen.append(http.headers)
        await http.reply(204, ())

    client = Client(app)
    client.send(client.headers(1, [*GET[:3], (b"cookie", b"a=1"), (b"host", b"h"), (b"cookie", b"b=2")]))
    headers, body = await client.reply()
    assert seen == [[(b"host", b"h"), (b"cookie", b"a=1; b=2")]]
    assert (headers[b":status"], body) == (b"204", b"")


@in_loop
async def test_a_reply_to_head_has_no_body() -> None:
    client = Client()
    client.send(client.headers(1, [(b":method", b"HEAD"), *GET[1:]]))
    headers, body = await client.reply()
    assert (headers[b"content-length"], body) == (b"2", b"")


@in_loop
async def test_a_body_is_asked_for_with_100_continue() -> None:
    client = Client(echo)
    client.send(client.headers(1, [*POST, (b"expect", b"100-continue")], end=False))
    [(kind, flags, _, payload)] = await client.frames()
    assert (kind, flags, client.decoder.decode(payload, raw=True)) == (
        HEADERS,
        frames.END_HEADERS,
        [(b":status", b"100")],
    )
    client.send(frame(DATA, END_STREAM, 1, b"x"))
    assert (await client.reply())[1] == b"x"


@in_loop
async def test_the_rest_of_an_answered_request_is_discarded_for_a_while() -> None:
    """A client that is told at once to stop may lose the reply: curl 7.88 does."""

    async def app(http: HttpRequest) -> None:
        await http.reply_json(b"{}", 401)

    client = Client(app)
    for stream_id in (1, 3, 5, 7):
        client.send(client.headers(stream_id, POST, end=False))
        assert [each[0] for each in await client.frames()] == [HEADERS, DATA]
    for _ in range(STREAM_WINDOW // 32_000 + 1):
        client.send(frame(DATA, 0, 1, b"x" * 16_000))
    assert [each[:3] for each in await client.frames()] == [(WINDOW_UPDATE, 0, 1)]
    client.send(frame(DATA, END_STREAM, 1, b"x") + client.headers(3, [(b"x", b"y")]))
    client.send(frames.rst_stream(5, ErrorCode.NO_ERROR))
    assert await client.frames() == []
    client.connection.cut_if_slow(client.connection.core.now + LINGER_S + 0.1, *TIMES)
    assert await client.resets() == {7: ErrorCode.NO_ERROR}
    client.send(frame(DATA, 0, 7, b"x" * 1000) + client.headers(7, [(b"x", b"y")]))  # on their way
    assert await client.frames() == []
    client.send(frame(DATA, 0, 1, b"x"))
    assert await client.resets() == {1: ErrorCode.STREAM_CLOSED}


@in_loop
async def test_an_answered_request_keeps_to_its_window_and_has_a_maximum(monkeypatch: Any) -> None:
    async def app(http: HttpRequest) -> None:
        await http.reply_json(b"{}", 401)

    monkeypatch.setattr("penstock.http.http2.closed_streams.MAX_LINGER_BYTES", 40_000)
    client = Client(app)
    client.send(client.headers(1, POST, end=False) + client.headers(3, POST, end=False))
    await client.frames()
    client.send(frame(DATA, 0, 1, b"x" * 16_000) * 3)
    assert await client.resets() == {1: ErrorCode.NO_ERROR}
    client.connection._closed._answered[3].window = 10
    client.send(frame(DATA, 0, 3, b"x" * 100))
    assert await client.resets() == {3: ErrorCode.FLOW_CONTROL_ERROR}
    assert not client.connection._closed.unfinished


@in_loop
@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ([(b":method", b"BREW"), *GET[1:]], b"501"),
        ([(b":method", b"CONNECT"), (b":authority", b"h")], b"501"),
        (GET[:3], b"400"),
        ([*GET[:3], (b":authority", b"h/x")], b"400"),
        ([*GET, (b"host", b"other")], b"400"),
        ([*GET, (b"expect", b"else")], b"417"),
        ([*GET, (b"authorization", b"a"), (b"authorization", b"b")], b"400"),
        ([*GET, *[(b"x-%d" % number, b"") for number in range(130)]], b"431"),
        ([*GET, (b"x", b"v" * 3000)], b"431"),
    ],
)
async def test_requests_that_are_not_for_this_server_get_a_reply(fields: Any, status: bytes) -> None:
    refusals = []
    client = Client(state=ServerState(limits=Limits(max_header_bytes=3000), on_refusal=refusals.append))
    client.send(client.headers(1, fields))
    headers, body = await client.reply()
    assert headers[b":status"] == status
    assert b'"error"' in body
    assert len(refusals) == 1
    client.send(client.headers(3))
    assert (await client.reply(3))[0][b":status"] == b"200"


@in_loop
@pytest.mark.parametrize(
    "fields",
    [
        [*GET, (b"Upper", b"x")],
        [*GET, (b"x", b"a\r\nb")],
        [*GET, (b"connection", b"close")],
        [*GET, (b"transfer-encoding", b"chunked")],
        [*GET, (b"te", b"gzip")],
        [*GET, (b":protocol", b"x")],
        [*GET[:3], (b"x", b"y"), GET[3]],
        [*GET, GET[0]],
        [*GET, (b":unknown", b"")],
        [GET[0], *GET[2:]],
        GET[1:],
        [*GET[:2], GET[3]],
        [*GET[:2], (b":path", b""), GET[3]],
        [*GET[:2], (b":path", b"x"), GET[3]],
        [*GET[:2], (b":path", b"/a b"), GET[3]],
        [*GET[:2], (b":path", b"/a#b"), GET[3]],
        [*GET[:2], (b":path", b"/caf\xe9"), GET[3]],
        [*GET, (b"content-length", b"5")],
        [*GET, (b"content-length", b"-1")],
    ],
)
async def test_malformed_requests_are_reset(fields: Any) -> None:
    client = Client()
    client.send(client.headers(1, fields))
    assert await client.resets() == {1: ErrorCode.PROTOCOL_ERROR}
    client.send(client.headers(3))
    assert (await client.reply(3))[0][b":status"] == b"200"


@in_loop
async def test_a_body_must_have_its_content_length() -> None:
    client = Client(echo)
    for stream_id, pieces in ((1, [b"xxx", b"x"]), (3, [b"xx"]), (5, [b"xxxx"])):
        client.send(client.headers(stream_id, [*POST, (b"content-length", b"3")], end=False))
        for number, piece in enumerate(pieces):
            flags = END_STREAM if number + 1 == len(pieces) and stream_id != 5 else 0
            client.send(frame(DATA, flags, stream_id, piece))
    assert await client.resets() == {1: ErrorCode.PROTOCOL_ERROR, 3: ErrorCode.PROTOCOL_ERROR, 5: 1}


@in_loop
async def test_an_application_that_fails_ends_its_stream_alone() -> None:
    async def app(http: HttpRequest) -> None:
        if http.path == "/before":
            raise ValueError
        if http.path == "/after":
            http.sink.begin(200, [])
            raise ValueError
        if http.path == "/without":
            return
        await http.reply_json(b"{}")

    client = Client(app)
    for stream_id, path in ((1, b"/before"), (3, b"/after"), (5, b"/without"), (7, b"/x")):
        client.send(client.headers(stream_id, [*GET[:2], (b":path", path), GET[3]]))
    statuses, resets = {}, {}
    for kind, _, stream_id, payload in await client.frames():
        if kind == HEADERS:
            statuses[stream_id] = dict(client.decoder.decode(payload, raw=True))[b":status"]  # type: ignore[arg-type]
        elif kind == RST_STREAM:
            resets[stream_id] = payload[-1]
    assert statuses == {1: b"500", 3: b"200", 7: b"200"}
    assert resets == {3: ErrorCode.INTERNAL_ERROR, 5: ErrorCode.INTERNAL_ERROR}


@in_loop
async def test_a_streamed_reply_begins_with_its_first_event_and_ends_with_its_last() -> None:
    app = Streaming()
    client = Client(app)
    client.send(client.headers(1) + client.headers(3))
    [sink, other] = app.sinks
    sink.send(b"data: 1\n\n", last=False)
    sink.write(b"data: 2\n\n")
    sink.send(b"data: 3\n\n", last=True)
    other.begin(206, [(b"x", b"y")])
    other.write_body(b"part")
    other.finish()
    received = await client.frames()
    assert [each[:3] for each in received] == [
        (HEADERS, frames.END_HEADERS, 1),
        (DATA, 0, 1),
        (DATA, 0, 1),
        (DATA, END_STREAM, 1),
        (HEADERS, frames.END_HEADERS, 3),
        (DATA, 0, 3),
        (DATA, END_STREAM, 3),
    ]
    fields = dict(client.decoder.decode(received[0][3], raw=True))  # type: ignore[arg-type]
    assert (fields[b":status"], fields[b"content-type"]) == (b"200", b"text/event-stream; charset=utf-8")
    assert received[1][3] == b"data: 1\n\n"


@in_loop
async def test_rst_stream_ends_a_reply_at_once_and_no_other() -> None:
    app = Streaming()
    client = Client(app)
    client.send(client.headers(1) + client.headers(3))
    client.send(frames.rst_stream(1, ErrorCode.CANCEL))
    assert [each.told for each in app.listeners] == [["disconnect"], []]
    app.sinks[0].write(b"late")
    app.sinks[0].send(b"late", last=True)
    app.sinks[0].cut()
    assert await client.frames() == []
    app.sinks[1].send(b"on", last=True)
    assert (await client.reply(3))[1] == b"on"


@pytest.mark.parametrize(
    "rest",
    [
        frames.rst_stream(1, 8),
        frame(DATA, 0, 1, b"ab") + frames.rst_stream(1, 8),
        frame(DATA, END_STREAM, 1, b"ab") + frames.rst_stream(1, 8),
        frames.window_update(1, 0),  # a fault of the stream
        frame(DATA, 0, 0, b"x"),  # a fault of the connection
    ],
)
@in_loop
async def test_a_request_whose_client_leaves_within_the_read_reaches_the_application(rest: bytes) -> None:
    """There it is counted and logged. It gets no body, and has nothing to do."""
    told = []

    async def app(http: HttpRequest) -> None:
        told.append(http.path)
        try:
            await http.read_body(100, lambda limit: ApiError(413, ""))
        except ClientGone:
            told.append("gone")

    client = Client(app)
    client.send(client.headers(1, POST, end=False) + rest)
    await client.frames()
    assert told == ["/x", "gone"]
    assert client.connection._abandoned == 0
    assert not client.state.tasks


@in_loop
async def test_a_refused_request_is_not_given_to_the_application_as_well() -> None:
    """Its reply waits for the client's window when the rest of its body comes."""
    told: list[str] = []

    async def app(http: HttpRequest) -> None:
        told.append(http.path)

    refused: list[ApiError] = []
    state = ServerState(limits=Limits(max_held_bytes=30_000), on_refusal=refused.append)
    client = Client(app, state, INITIAL_WINDOW_SIZE=0)
    client.send(client.headers(1, POST, end=False) + frame(DATA, 0, 1, b"x" * 16_000) * 2)
    await client.frames()
    assert (len(refused), told) == (1, [])


@in_loop
async def test_a_reply_that_listens_after_its_client_has_gone_is_told() -> None:
    listener, wake = Recorder(), asyncio.Event()

    async def app(http: HttpRequest) -> None:
        await wake.wait()
        http.sink.listen(listener)
        await http.reply_json(b"{}")

    client = Client(app)
    client.send(client.headers(1) + frames.rst_stream(1, ErrorCode.CANCEL))
    wake.set()
    assert await client.frames() == []
    assert listener.told == ["disconnect"]


@in_loop
async def test_cut_resets_the_stream_alone() -> None:
    app = Streaming()
    client = Client(app)
    client.send(client.headers(1) + client.headers(3))
    app.sinks[0].send(b"begun", last=False)
    app.sinks[0].cut()
    assert await client.resets() == {1: ErrorCode.CANCEL}
    assert [each.told for each in app.listeners] == [[], []]


@in_loop
async def test_bodies_beyond_the_budget_lose_the_largest_of_them() -> None:
    state = ServerState(limits=Limits(max_held_bytes=100_000))

    async def app(http: HttpRequest) -> None:
        try:
            while await http.read_part():
                pass
        except ApiError as error:
            await http.reply_error(error)

    client = Client(app, state)
    for stream_id in (1, 3, 5):
        client.send(client.headers(stream_id, POST, end=False))
    for stream_id, size in ((1, 16_000), (3, 16_000), (3, 16_000), (3, 16_000), (1, 16_000), (5, 16_000)):
        client.send(frame(DATA, 0, stream_id, b"x" * size))
    client.send(frame(DATA, 0, 5, b"x" * 16_000))
    found = {each[2]: each for each in await client.frames() if each[0] == HEADERS}
    assert list(found) == [3]
    assert dict(client.decoder.decode(found[3][3], raw=True))[b":status"] == b"503"  # type: ignore[arg-type]
    assert state.budget.held == 64_000


@in_loop
async def test_a_client_that_lowers_its_header_table_is_told_that_it_is_not_used() -> None:
    """Decoders insist on it (RFC 7541 §4.2): that of nghttp2 as well as that of h2."""
    client = Client(HEADER_TABLE_SIZE=100)
    client.decoder.max_allowed_table_size = 100
    for stream_id in (1, 3):
        client.send(client.headers(stream_id))
        assert (await client.reply(stream_id))[0][b":status"] == b"200"
    client.send(frames.settings_frame({frames.HEADER_TABLE_SIZE: 4096}) + client.headers(5))
    assert (await client.reply(5))[0][b":status"] == b"200"
