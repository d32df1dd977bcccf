"""How connections end: drained, idle, slow, lost; each without taking a reply with it."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

from penstock.http.errors import ApiError
from penstock.http.http2 import frames
from penstock.http.http2.faults import ErrorCode
from penstock.http.http2.frames import (
    CONTINUATION,
    DATA,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    STREAM_BITS,
    frame,
)
from penstock.http.http2.header_blocks import encode_fields
from penstock.http.request import HttpRequest
from penstock.http.server_state import LINGER_S, ServerState
from tests.http.http2.clients import GET, POST, TIMES, Client, Streaming, in_loop


def goaways(received: list[frames.Frame]) -> list[tuple[int, int]]:
    """Last stream and code of each GOAWAY."""
    return [frames.unpack_goaway(each[3])[:2] for each in received if each[0] == GOAWAY]


@in_loop
async def test_an_idle_connection_is_closed_when_the_server_ends() -> None:
    client = Client()
    client.send(client.headers(1))
    await client.frames()
    client.connection.shutdown()
    assert goaways(client.received()) == [(1, 0)]
    assert client.transport.end == "eof", "it may still send WINDOW_UPDATE for the reply"
    assert not client.connection.eof_received()


@in_loop
async def test_a_connection_that_was_idle_is_closed_when_its_client_knows() -> None:
    """A request that crosses the first GOAWAY is served: closing would reset it without a word."""
    for late in (False, True):
        client = Client()
        client.connection.idle_since -= 2.0
        client.connection.shutdown()
        [first, ping] = await client.frames()
        assert goaways([first]) == [(STREAM_BITS, 0)]
        if late:
            client.send(client.headers(1))
            assert [each[0] for each in await client.frames()] == [HEADERS, DATA]
        client.send(frame(PING, frames.ACK, 0, ping[3]))
        assert goaways(await client.frames()) == [(1 if late else 0, 0)]
        assert client.transport.end == ("eof" if late else "close")


@in_loop
async def test_a_busy_connection_serves_what_is_on_its_way_and_ends_with_its_last_reply() -> None:
    app = Streaming()
    client = Client(app)
    client.send(client.headers(1))
    client.connection.shutdown()
    client.connection.shutdown()
    [first, ping] = await client.frames()
    assert goaways([first]) == [(STREAM_BITS, 0)]
    assert ping[0] == PING
    client.send(client.headers(3) + frame(PING, frames.ACK, 0, ping[3]))
    assert goaways(await client.frames()) == [(3, 0)]
    client.send(client.headers(5) + frame(DATA, END_STREAM, 5, b"x"))  # not served, which the client knows
    assert await client.frames() == []
    for sink in app.sinks:
        assert client.transport.end == ""
        sink.send(b"x", last=True)
    assert client.transport.end == "eof"
    assert [each[0] for each in await client.frames()] == [HEADERS, DATA] * 2


@in_loop
async def test_the_last_goaway_does_not_wait_for_a_client_that_answers_no_ping(monkeypatch: Any) -> None:
    monkeypatch.setattr("penstock.http.http2.connection.GOAWAY_DELAY_S", 0.001)
    client = Client(Streaming())
    client.send(client.headers(1))
    client.connection.shutdown()
    await asyncio.sleep(0.01)
    assert goaways(await client.frames()) == [(STREAM_BITS, 0), (1, 0)]


@in_loop
async def test_a_server_that_retires_tells_its_clients() -> None:
    client = Client()
    client.state.ending = True
    client.send(client.headers(1))
    received = await client.frames()
    assert [each[0] for each in received] == [HEADERS, DATA, GOAWAY]
    assert client.transport.end == "eof"


@in_loop
async def test_a_server_that_ends_answers_one_request_of_a_new_connection_however_it_is_cut() -> None:
    """Clients send the preface first, and a body behind its HEADERS."""

    async def answer_body(http: HttpRequest) -> None:
        while await http.read_part():
            pass
        await http.reply_json(b"{}")

    client = Client(answer_body, ServerState(ending=True))
    assert goaways(await client.frames()) == []
    client.send(client.headers(1, POST, end=False))
    assert goaways(await client.frames()) == []
    client.send(frame(DATA, END_STREAM, 1, b"x"))
    assert [each[0] for each in await client.frames()] == [HEADERS, DATA]
    client.connection.cut_if_slow(client.connection.core.now, *TIMES)
    assert goaways(await client.frames()) == [(1, 0)]
    assert client.transport.end == "eof"


@in_loop
async def test_a_server_that_ends_waits_a_second_for_the_request_of_a_new_connection() -> None:
    client = Client(state=ServerState(ending=True))
    client.connection.cut_if_slow(client.connection.core.now, *TIMES)
    assert await client.frames() == []
    client.connection.idle_since -= 1.0
    client.connection.cut_if_slow(client.connection.core.now, *TIMES)
    assert goaways(await client.frames()) == [(STREAM_BITS, 0)]


@in_loop
async def test_an_idle_connection_is_closed() -> None:
    client = Client()
    client.send(client.headers(1))
    since = client.connection.idle_since = client.connection.idle_since - 10.0
    client.connection.cut_if_slow(since + 75.0, *TIMES)
    assert client.transport.end == ""
    client.connection.cut_if_slow(since + 75.1, *TIMES)
    client.connection.cut_if_slow(since + 75.2, *TIMES)
    *_, first, ping = await client.frames()
    assert goaways([first]) == [(STREAM_BITS, 0)]
    client.send(frame(PING, frames.ACK, 0, ping[3]))
    assert client.transport.end == "close"
    assert goaways(await client.frames()) == [(1, 0)]


@in_loop
async def test_a_closing_connection_discards_what_comes_for_a_while() -> None:
    client = Client()
    client.send(b"x" * 9)
    assert client.transport.end == "eof"
    client.send(b"late")
    client.connection.cut_if_slow(client.connection.core.now + LINGER_S - 0.1, *TIMES)
    assert client.transport.end == "eof"
    client.connection.cut_if_slow(client.connection.core.now + LINGER_S + 0.2, *TIMES)
    assert client.transport.end == "abort"


@in_loop
async def test_a_connection_with_a_stream_is_not_idle() -> None:
    client = Client(Streaming())
    client.send(client.headers(1))
    client.connection.cut_if_slow(client.connection.core.now + 1000.0, *TIMES)
    assert client.transport.end == ""


@in_loop
async def test_frames_and_header_blocks_have_their_time_to_arrive() -> None:
    for start in (
        frames.frame_header(100, DATA, 0, 1),
        frame(HEADERS, 0, 1, encode_fields(GET)),
    ):
        client = Client()
        client.send(start)
        now = client.connection.core.now
        client.connection.cut_if_slow(now + 29.0, *TIMES)
        assert client.transport.end == ""
        client.connection.cut_if_slow(now + 31.0, *TIMES)
        assert (await client.goaway())[0] is ErrorCode.PROTOCOL_ERROR


@in_loop
async def test_a_busy_connection_whose_reads_end_within_frames_is_not_slow() -> None:
    client = Client()
    now = client.connection.core.now
    requests = b"".join(client.headers(2 * n + 1) for n in range(100))
    for second in range(100):
        client.clock.now = now + second
        piece = len(requests) // 100
        client.send(requests[second * piece : (second + 1) * piece])
        client.connection.cut_if_slow(now + second, *TIMES)
    assert client.transport.end == ""


@in_loop
async def test_a_header_block_that_drips_has_its_time() -> None:
    client = Client()
    now = client.connection.core.now
    client.send(frame(HEADERS, 0, 1, encode_fields(GET)))
    for second in range(40):
        client.clock.now = now + second
        if not client.transport.end:
            client.send(frame(CONTINUATION, 0, 1, b"\x82"))
        client.connection.cut_if_slow(now + second, *TIMES)
    assert goaways(client.received()) == [(0, ErrorCode.PROTOCOL_ERROR)]


@in_loop
async def test_a_body_has_its_time_to_arrive_and_others_go_on() -> None:
    statuses, refusals = list[tuple[int, bytes]](), list[ApiError]()

    async def app(http: HttpRequest) -> None:
        try:
            while await http.read_part():
                pass
        except ApiError as error:
            await http.reply_error(error)

    client = Client(app, ServerState(on_refusal=refusals.append))
    client.send(client.headers(1, POST, end=False) + client.headers(3, POST, end=False))
    now = client.connection.core.now
    for late in (1.0, 25.0, 50.0):
        client.clock.now = now + late
        client.connection.cut_if_slow(now + late, *TIMES)
        client.send(frame(DATA, 0, 3, b"x" * 16_000))
        for each in await client.frames():
            if each[0] == HEADERS:
                fields = client.decoder.decode(each[3], raw=True)
                statuses.append((each[2], dict(fields)[b":status"]))  # type: ignore[arg-type]
    assert statuses == [(1, b"408")]
    assert refusals == [], "the application answers, and so counts and logs the request once"
    assert list(client.connection.streams) == [3]


@in_loop
async def test_a_lost_connection_leaves_nothing_behind() -> None:
    app = Streaming()
    client = Client(app)
    client.send(client.headers(1) + client.headers(3, POST, end=False) + frames.frame_header(100, DATA, 0, 3))
    app.sinks[0].send(b"x" * 100_000, last=False)
    assert client.state.budget.held
    client.connection.connection_lost(ConnectionResetError())
    assert [listener.told[-1] for listener in app.listeners] == ["disconnect", "disconnect"]
    assert client.state.budget.held == 0
    assert not client.state.connections
    for sink in app.sinks:
        sink.write(b"late")
        assert sink.write_target is None
    client.connection.shutdown()
    assert client.state.windows.writers == [None] * len(client.state.windows.writers)


@in_loop
async def test_too_many_lingering_connections_close_at_once() -> None:
    client = Client()
    client.state.lingering |= {object() for _ in range(client.state.limits.max_lingering)}  # type: ignore[misc]
    client.connection.shutdown()
    assert client.transport.end == "close"


@in_loop
async def test_with_tls_a_client_closes_after_goaway_and_a_faulty_one_is_closed() -> None:
    ends = []
    for start in (b"", frames.window_update(0, 0)):
        client = Client()
        client.transport.can_write_eof = lambda: False  # type: ignore[method-assign]
        client.send(start)
        client.connection.shutdown()
        ends.append(client.transport.end)
        client.connection.cut_if_slow(client.connection.core.now + LINGER_S + 0.1, *TIMES)
        ends.append(client.transport.end)
    assert ends == ["", "abort", "close", "abort"]


@in_loop
async def test_a_lost_connection_needs_no_garbage_collection(monkeypatch: Any) -> None:
    monkeypatch.setattr("penstock.http.http2.connection.GOAWAY_DELAY_S", 0.001)
    failures: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
    for ends in ("lost", "drained", "faulty"):
        app = Streaming()
        client = Client(app)
        client.send(client.headers(1))
        await client.frames()
        if ends == "drained":
            client.connection.shutdown()
        elif ends == "faulty":
            client.send(frame(PING, 0, 1, bytes(8)))
        client.connection.connection_lost(None)
        await asyncio.sleep(0.005)  # until the timer of the second GOAWAY
        connection = weakref.ref(client.connection)
        app.sinks.clear()
        del client.transport.protocol
        gc.disable()
        try:
            del client
            assert connection() is None
        finally:
            gc.enable()
    assert not failures
