"""How replies are sent: within windows, large ones in turns, rows never behind them; and slow clients."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from penstock.http.http2 import frames
from penstock.http.http2.faults import ErrorCode
from penstock.http.http2.frames import (
    DATA,
    END_STREAM,
    HEADERS,
    MAX_WINDOW,
    Frame,
    settings_frame,
    window_update,
)
from penstock.http.http2.sender import BULK_BYTES, MAX_UNSENT_BYTES, UNSENT_BYTES_PER_STREAM
from penstock.http.request import HttpRequest
from tests.http.http2.clients import GET, TIMES, Client, Streaming, in_loop

LARGE = 200_000
FRAME = frames.DEFAULT_FRAME_SIZE


async def large(http: HttpRequest) -> None:
    await http.reply_json(http.path[1:2].encode() * LARGE)


def request(client: Client, stream_id: int, path: bytes) -> bytes:
    return client.headers(stream_id, [*GET[:2], (b":path", path), GET[3]])


def data(received: list[Frame]) -> list[tuple[int, int]]:
    """Stream and size of each DATA frame."""
    return [(each[2], len(each[3])) for each in received if each[0] == DATA]


def row(sink: Any, windows: Any, event: bytes) -> bytes:
    """A row as the row writer makes it: window taken, framed."""
    path = sink.write_target
    windows.streams[path.window] -= len(event)
    windows.connections[windows.connection_of[path.window]] -= len(event)
    return len(event).to_bytes(3, "big") + path.prefix + event


@in_loop
async def test_a_large_reply_keeps_within_the_windows_and_goes_on_when_they_open() -> None:
    client = Client(large)
    client.send(request(client, 1, b"/a"))
    received = await client.frames()
    assert data(received) == [(1, FRAME)] * 3 + [(1, 65_535 - 3 * FRAME)]
    client.send(window_update(1, 100_000))  # that of the connection is used up
    assert data(await client.frames()) == []
    client.send(window_update(0, 50_000))
    assert sum(size for _, size in data(await client.frames())) == 50_000
    client.send(window_update(0, MAX_WINDOW // 2) + settings_frame({frames.INITIAL_WINDOW_SIZE: LARGE}))
    received = await client.frames()
    assert sum(size for _, size in data(received)) == LARGE - 65_535 - 50_000
    assert received[-1][1] == END_STREAM
    assert not client.connection.streams


@in_loop
async def test_windows_that_open_in_small_steps_are_used_together() -> None:
    app = Streaming()
    client = Client(app, INITIAL_WINDOW_SIZE=MAX_WINDOW)
    client.send(client.headers(1) + client.headers(3))
    app.sinks[0].send(b"x" * 65_535, last=False)
    app.sinks[1].send(b"y" * 500, last=False)
    await client.frames()
    client.send(window_update(0, 10) * 50)
    assert data(await client.frames()) == [(3, 500)]


@in_loop
async def test_large_replies_take_turns_and_small_ones_and_events_pass_them() -> None:
    events = Streaming()

    async def app(http: HttpRequest) -> None:
        if http.path == "/events":
            await events(http)
        elif http.path == "/small":
            await http.reply_json(b"small")
        else:
            await large(http)

    client = Client(app, INITIAL_WINDOW_SIZE=MAX_WINDOW)
    client.transport.stalled = True
    client.send(window_update(0, MAX_WINDOW - 65_535))
    client.send(request(client, 1, b"/events"))
    events.sinks[0].send(b"first", last=False)
    client.send(request(client, 3, b"/a") + request(client, 5, b"/b"))
    received = await client.frames()
    turns = [stream_id for stream_id, size in data(received) if size == FRAME]
    assert turns == [3, 5] * (BULK_BYTES // FRAME // 2), "what the transport takes before it is congested"
    windows = client.state.windows
    for _ in range(3):
        client.connection.sender.write_frames(row(events.sinks[0], windows, b"row"))
        assert client.received() == [(DATA, 0, 1, b"row")]
    events.sinks[0].write(b"by write")
    assert await client.frames() == [(DATA, 0, 1, b"by write")]
    order = []
    for _ in range(20):
        client.transport.drain()
        order += data(await client.frames())
    assert sum(size for _, size in order) == 2 * LARGE - sum(size for _, size in data(received)[1:])
    both = [stream_id for stream_id, _ in order][: 2 * (LARGE // FRAME) - 10]
    assert all(a != b for a, b in pairwise(both)), "they take turns"
    client.send(request(client, 7, b"/small"))
    client.transport.drain()
    assert (7, 5) in data(await client.frames())


@in_loop
async def test_a_row_follows_what_was_written_before_it_in_the_same_turn() -> None:
    app = Streaming()
    client = Client(app)
    client.send(client.headers(1))
    sink = app.sinks[0]
    sink.send(b"1", last=False)
    client.connection.sender.write_frames(row(sink, client.state.windows, b"2"))
    sink.write(b"3")
    sink.send(b"4", last=True)
    received = await client.frames()
    assert [each[3] for each in received[1:]] == [b"1", b"2", b"3", b"4"]
    assert received[-1][1] == END_STREAM


@in_loop
async def test_an_event_larger_than_a_frame_or_a_window_is_sent_in_pieces() -> None:
    app = Streaming()
    client = Client(app)
    client.send(client.headers(1))
    sink = app.sinks[0]
    sink.send(b"x" * 40_000, last=False)
    assert data(await client.frames()) == [(1, FRAME), (1, FRAME), (1, 40_000 - 2 * FRAME)]
    assert app.listeners[0].told == []
    sink.write(b"y" * 30_000)
    assert app.listeners[0].told == ["pause"]
    assert (sink.unread(), sink.write_target) == (70_000 - 65_535, None)
    client.send(window_update(0, 100_000) + window_update(1, 100_000))
    assert app.listeners[0].told == ["pause", "resume"]
    assert (sink.unread(), sink.write_target is not None) == (0, True)
    sink.send(b"z", last=True)
    received = await client.frames()
    assert (sum(size for _, size in data(received)), received[-1][3]) == (30_001, b"z")


@in_loop
async def test_the_end_of_a_reply_waits_for_the_window() -> None:
    app = Streaming()
    client = Client(app, INITIAL_WINDOW_SIZE=3)
    client.send(client.headers(1) + client.headers(3))
    app.sinks[0].send(b"12345", last=True)
    app.sinks[1].send(b"123", last=False)
    app.sinks[1].send(b"", last=True)  # no window is needed for the end alone
    received = await client.frames()
    assert [(each[2], each[1], each[3]) for each in received if each[0] == DATA] == [
        (1, 0, b"123"),
        (3, 0, b"123"),
        (3, END_STREAM, b""),
    ]
    assert app.listeners[0].told == []
    client.send(window_update(1, 2))
    assert await client.frames() == [(DATA, END_STREAM, 1, b"45")]


@in_loop
async def test_settings_may_make_windows_negative() -> None:
    app = Streaming()
    client = Client(app, INITIAL_WINDOW_SIZE=100)
    client.send(client.headers(1))
    app.sinks[0].send(b"x" * 80, last=False)
    client.send(settings_frame({frames.INITIAL_WINDOW_SIZE: 10}))  # 20 - 90 are left
    app.sinks[0].write(b"y" * 5)
    await client.frames()
    client.send(window_update(1, 70))
    assert await client.frames() == []
    client.send(window_update(1, 1))
    assert await client.frames() == [(DATA, 0, 1, b"y")]


@in_loop
async def test_a_client_that_reads_nothing_pauses_all_its_streams_and_is_cut() -> None:
    app = Streaming()
    client = Client(app, INITIAL_WINDOW_SIZE=MAX_WINDOW)
    client.send(window_update(0, MAX_WINDOW - 65_535))
    client.send(b"".join(client.headers(2 * n + 1) for n in range(100)))
    for sink in app.sinks:
        sink.send(b"first", last=False)
    await client.frames()
    client.transport.stalled = True
    windows = client.state.windows
    for _ in range(MAX_UNSENT_BYTES // 16_000 + 2):
        client.connection.sender.write_frames(row(app.sinks[0], windows, b"x" * 16_000))
        if app.listeners[0].told:
            break
    assert [listener.told for listener in app.listeners] == [["pause"]] * 100
    assert app.sinks[0].write_target is None
    app.sinks[1].write(b"held")
    assert app.sinks[1].unread() == 4
    client.received()
    client.transport.drain()
    assert [each for each in await client.frames() if each[0] == DATA] == [(DATA, 0, 3, b"held")]
    assert [listener.told for listener in app.listeners] == [["pause", "resume"]] * 100
    assert app.sinks[0].write_target is not None
    now = client.connection.core.now
    for _ in range(2):
        client.connection.sender.write_frames(row(app.sinks[0], windows, b"x" * 16_000))
        for late in (30.0, 74.0):
            client.connection.cut_if_slow(now + late, *TIMES)
        client.transport.unread -= 1  # it reads, if slowly
        now += 74.0
        client.connection.cut_if_slow(now, *TIMES)
    assert client.transport.end == ""
    client.connection.cut_if_slow(now + 76.0, *TIMES)
    assert client.transport.end == "abort"


@in_loop
async def test_a_client_that_has_never_read_has_its_time_too() -> None:
    client = Client(Streaming())
    client.send(client.headers(1))
    client.transport.unread = client.connection.sender._written
    now = client.connection.core.now
    client.connection.cut_if_slow(now, *TIMES)
    client.connection.cut_if_slow(now + 75.0, *TIMES)
    assert client.transport.end == ""
    client.connection.cut_if_slow(now + 75.1, *TIMES)
    assert client.transport.end == "abort"


@in_loop
async def test_a_connection_of_many_streams_may_be_behind_by_some_events_of_each() -> None:
    app = Streaming()
    client = Client(app, INITIAL_WINDOW_SIZE=MAX_WINDOW)
    client.send(window_update(0, MAX_WINDOW - 65_535))
    for n in range(1000):
        client.send(client.headers(2 * n + 1))
    client.transport.stalled = True
    while not app.listeners[0].told:
        for sink in app.sinks:
            sink.send(b"x" * 200, last=False)
        client.connection.sender.flush()
    assert 1000 * UNSENT_BYTES_PER_STREAM < client.transport.unread < 1000 * (UNSENT_BYTES_PER_STREAM + 500)


@pytest.mark.parametrize("window", [0, 1, 100])
@in_loop
async def test_a_large_reply_to_head_or_without_a_body_needs_no_window(window: int) -> None:
    client = Client(large, INITIAL_WINDOW_SIZE=window)
    client.send(client.headers(1, [(b":method", b"HEAD"), *GET[1:]]))
    assert [each[:3] for each in await client.frames()] == [(HEADERS, frames.END_HEADERS | END_STREAM, 1)]


@in_loop
async def test_a_part_waits_while_the_client_does_not_read() -> None:
    """An application that sends its reply in parts waits, and is told when its client has gone."""
    sent = []

    async def app(http: HttpRequest) -> None:
        await http.begin(200, [])
        for number in range(5):
            await http.write(b"x" * 10)
            sent.append(number)

    client = Client(app, INITIAL_WINDOW_SIZE=15)
    client.send(client.headers(1))
    await client.frames()
    assert sent == [0, 1]
    client.send(window_update(1, 10))
    await client.frames()
    assert sent == [0, 1, 2]
    client.send(frames.rst_stream(1, ErrorCode.CANCEL))
    await client.frames()
    assert not client.state.tasks


@in_loop
async def test_a_relayed_reply_of_known_length_waits_where_events_do_not() -> None:
    app = Streaming()
    client = Client(app, INITIAL_WINDOW_SIZE=MAX_WINDOW)
    client.send(window_update(0, MAX_WINDOW - 65_535) + client.headers(1) + client.headers(3))
    client.transport.stalled = True
    sized, events = app.sinks
    sized.begin(200, [(b"content-length", b"1000000")])
    events.begin(200, [(b"content-type", b"text/event-stream")])
    while not app.listeners[0].told:
        sized.write_body(b"x" * 10_000)
        events.write_body(b"y" * 10_000)
        await client.frames()
    assert client.transport.unread < BULK_BYTES + 40_000
    events.write_body(b"y" * 10_000)
    assert data(await client.frames()) == [(3, 10_000)]
    assert [listener.told for listener in app.listeners] == [["pause"], []]
    client.transport.drain()
    assert data(await client.frames()) == [(1, 10_000)]
    assert [listener.told for listener in app.listeners] == [["pause", "resume"], []]


@pytest.mark.parametrize("headers", [[(b"content-length", b"9")], []], ids=["sized", "unsized"])
@in_loop
async def test_a_reply_that_its_client_does_not_take_is_cut_also_before_its_end(headers: Any) -> None:
    async def parts(http: HttpRequest) -> None:
        await http.begin(200, headers)
        await http.write(b"123")
        await http.write(b"456789")
        await http.finish()

    client = Client(parts, INITIAL_WINDOW_SIZE=0)
    client.send(client.headers(1))
    await client.frames()
    now = client.connection.core.now
    client.connection.cut_if_slow(now + 75.0, *TIMES)
    assert await client.resets() == {}
    client.connection.cut_if_slow(now + 75.1, *TIMES)
    assert await client.resets() == {1: ErrorCode.CANCEL}
