"""One connection without a socket: when it is cut, and what is written to it."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from typing import Any

import pytest

from penstock.http.errors import ApiError
from penstock.http.http1.chunked_body import CHUNKS_PER_ROUND, CHUNKS_PER_TURN
from penstock.http.http1.chunks import chunk
from penstock.http.http1.connection import MAX_WAITING_BYTES, ServerProtocol
from penstock.http.http2.connection import Http2Connection
from penstock.http.http2.frames import PREFACE, settings_frame
from penstock.http.request import ClientGone, HttpRequest
from penstock.http.server_state import Limits, ServerState
from tests.http.connections import REQUEST, App, answer, connection, settle

TIMES = (30.0, 75.0)
"""For a request to arrive, and for an idle connection."""


def test_an_idle_connection_is_closed() -> None:
    async def run() -> None:
        protocol, transport = connection()
        protocol.cut_if_slow(75.0, *TIMES)
        assert transport.end == ""
        protocol.cut_if_slow(75.1, *TIMES)
        assert transport.end == "close"

    asyncio.run(run())


def test_a_request_has_its_time_to_arrive() -> None:
    async def run() -> None:
        protocol, transport = connection()
        protocol.data_received(REQUEST[:10])
        assert protocol.timer.waiting_since is not None
        protocol.cut_if_slow(protocol.timer.waiting_since + 30.0, *TIMES)
        assert (transport.end, transport.written) == ("", b"")
        protocol.cut_if_slow(protocol.timer.waiting_since + 30.1, *TIMES)
        assert transport.end == "eof"
        assert transport.written.startswith(b"HTTP/1.1 408 ")

    asyncio.run(run())


def test_connections_beyond_the_limit_are_told_so_in_their_protocol() -> None:
    async def run() -> None:
        state = ServerState(limits=Limits(max_connections=1, max_lingering=2))
        connection(state=state)
        protocol, transport = connection(state=state)
        protocol.data_received(REQUEST)
        assert transport.written.startswith(b"HTTP/1.1 503 ")
        protocol.connection_lost(None)

        protocol, transport = connection(state=state)
        protocol.data_received(PREFACE)
        assert isinstance(transport.protocol, Http2Connection)
        assert transport.written.startswith(settings_frame({})[3:9], 3), "it speaks HTTP/2"
        transport.protocol.connection_lost(None)

        silent, transport = connection(state=state)
        silent.timer.idle_since = now = state.clock()
        silent.cut_if_slow(now + 0.5, *TIMES)
        assert transport.written == b""
        silent.cut_if_slow(now + 1.1, *TIMES)
        assert transport.written.startswith(b"HTTP/1.1 503 ")

        connection(state=state)
        _, transport = connection(state=state)
        assert transport.written.startswith(b"HTTP/1.1 503 "), "more than may linger do not wait"

    asyncio.run(run())


BODY = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"
CHUNKS = b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_a_malformed_body_that_comes_with_its_head_is_refused_before_the_application() -> None:
    """An application that does not read bodies would answer it."""
    refusals = list[ApiError]()

    async def run() -> None:
        state = ServerState(on_refusal=refusals.append)
        protocol, transport = connection(answer, state)
        protocol.data_received(CHUNKS + b"x\r\n")
        await settle()
        assert transport.written.startswith(b"HTTP/1.1 400 ")
        assert transport.written.count(b"HTTP/1.1") == 1
        assert (transport.end, [error.status for error in refusals]) == ("eof", [400])

    asyncio.run(run())


@pytest.mark.parametrize("why", ["late", "malformed", "over budget"])
def test_the_application_answers_a_request_whose_body_fails(why: str) -> None:
    """So it counts and logs the request once, with the status that the client gets."""
    refusals, ends = list[ApiError](), list[object]()

    async def app(http: HttpRequest) -> None:
        try:
            ends.append(await http.read_body(100, lambda limit: ApiError(413, "")))
        except ApiError as error:
            ends.append(error.status)
            await http.reply_json(b"{}", error.status)

    async def run() -> None:
        state = ServerState(limits=Limits(max_held_bytes=4), on_refusal=refusals.append)
        protocol, transport = connection(app, state)
        protocol.data_received(CHUNKS if why == "malformed" else BODY)
        await settle()
        if why == "late":
            assert protocol.timer.waiting_since is not None
            protocol.cut_if_slow(protocol.timer.waiting_since + 30.1, *TIMES)
        else:
            protocol.data_received(b"x\r\n" if why == "malformed" else b"12345")
        await settle()
        status = {"late": 408, "malformed": 400, "over budget": 503}[why]
        assert ends == [status]
        assert transport.written.startswith(b"HTTP/1.1 %d " % status)
        assert b"connection: close\r\n" in transport.written
        assert transport.written.count(b"HTTP/1.1") == 1
        assert (transport.end, refusals, state.budget.held) == ("eof", [], 0)

    asyncio.run(run())


def test_a_client_that_does_not_read_its_reply_is_cut() -> None:
    async def run() -> None:
        protocol, transport = connection()
        protocol.data_received(REQUEST)
        await settle()
        assert transport.written.startswith(b"HTTP/1.1 200")
        protocol.timer.idle_since = 0.0
        for now, unread in ((60.0, 300), (120.0, 200), (180.0, 100), (255.0, 100)):
            transport.unread = unread
            protocol.cut_if_slow(now, *TIMES)
            assert transport.end == "", "it reads, if slowly"
        protocol.cut_if_slow(255.1, *TIMES)
        assert transport.end == "abort"

    asyncio.run(run())


@pytest.mark.parametrize("headers", [[(b"content-length", b"9")], []], ids=["sized", "chunked"])
def test_a_reply_that_its_client_does_not_take_is_cut_also_before_its_end(headers: Any) -> None:
    async def run() -> None:
        async def large(http: HttpRequest) -> None:
            await http.begin(200, headers)
            await http.write(b"1")
            await asyncio.Event().wait()  # as for room

        protocol, transport = connection(large)
        protocol.data_received(REQUEST)
        await settle()
        transport.unread = 100
        protocol.cut_if_slow(100.0, *TIMES)
        protocol.cut_if_slow(175.1, *TIMES)
        assert transport.end == "abort"
        await end_tasks()

    asyncio.run(run())


async def end_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def stream(http: HttpRequest) -> None:
    http.sink.send(b"first", last=False)
    await asyncio.Event().wait()


def test_a_stream_may_be_silent_and_unread_for_as_long_as_it_likes() -> None:
    async def run() -> None:
        protocol, transport = connection(stream)
        protocol.data_received(REQUEST)
        await settle()
        transport.unread = 100
        for now in (100.0, 1000.0, 10_000.0):
            protocol.cut_if_slow(now, *TIMES)
        assert transport.end == ""
        await end_tasks()

    asyncio.run(run())


def test_what_waits_behind_a_request_is_bounded_and_not_late() -> None:
    async def run() -> None:
        protocol, transport = connection(stream)
        protocol.data_received(REQUEST + b"GET /")
        await settle()
        assert transport.reading, "to hear when the client leaves"
        protocol.data_received(b"x" * MAX_WAITING_BYTES)
        assert not transport.reading
        assert protocol.timer.waiting_since is None
        protocol.cut_if_slow(1e9, *TIMES)
        assert (transport.end, transport.written.count(b"HTTP/1.1")) == ("", 1)
        protocol.send(b"", last=True)
        await settle()
        assert transport.reading
        assert protocol.timer.waiting_since is not None
        await end_tasks()

    asyncio.run(run())


def test_any_number_of_requests_of_one_read_are_answered() -> None:
    """Each is answered at once, and none within the call that has ended the one before."""

    async def run() -> None:
        protocol, transport = connection()
        protocol.data_received(2000 * REQUEST)
        for _ in range(2000):
            await asyncio.sleep(0)
        assert transport.written.count(b"HTTP/1.1 200") == 2000
        assert transport.end == ""

    asyncio.run(run())


def test_requests_that_wait_when_their_client_ends_its_sending_side_are_answered() -> None:
    async def run() -> None:
        protocol, transport = connection()
        protocol.data_received(REQUEST * 500)
        assert protocol.eof_received(), "the connection stays open"
        for _ in range(1000):
            await asyncio.sleep(0)
        assert transport.written.count(b"HTTP/1.1 200 OK") == 500
        assert transport.written.count(b"connection: close") == 1, "of the last reply"
        assert transport.end == "close"

    asyncio.run(run())


def test_a_client_that_ends_its_sending_side_within_a_request_has_left() -> None:
    async def run() -> None:
        for sent in (b"", REQUEST[:10], REQUEST, REQUEST + REQUEST[:10]):
            protocol, _ = connection()
            protocol.data_received(sent)
            await settle()
            assert not protocol.eof_received()

    asyncio.run(run())


def test_a_client_that_reads_no_replies_gets_no_further_ones() -> None:
    async def fill(http: HttpRequest) -> None:
        assert isinstance(http.sink, ServerProtocol)
        http.sink.begin(200, [(b"content-length", b"0")])
        http.sink.pause_writing()
        http.sink.finish()

    async def run() -> None:
        protocol, transport = connection(fill)
        protocol.data_received(3 * REQUEST)
        for count in (1, 2, 3):
            await settle()
            assert transport.written.count(b"HTTP/1.1 200") == count
            protocol.resume_writing()

    asyncio.run(run())


def test_the_head_of_a_reply_is_one_write_with_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []

    async def in_parts(http: HttpRequest) -> None:
        http.sink.begin(200, [(b"content-length", b"6")])
        assert (written, http.sink.write_target) == ([], None)
        http.sink.write_body(b"abc")
        http.sink.write_body(b"def")
        http.sink.finish()

    async def empty(http: HttpRequest) -> None:
        http.sink.begin(200, [(b"content-length", b"0")])
        http.sink.finish()

    async def large(http: HttpRequest) -> None:
        http.sink.reply(200, [(b"content-length", b"1000000")], bytes(1_000_000))

    async def run() -> None:
        for app, sizes in ((in_parts, [3, 3]), (empty, [0]), (large, [0, 1_000_000])):
            protocol, transport = connection(app)
            monkeypatch.setattr(transport, "write", written.append)
            protocol.data_received(REQUEST)
            await settle()
            head, _, rest = written[0].partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert [len(rest), *map(len, written[1:])] == sizes
            written.clear()

    asyncio.run(run())


def test_the_head_and_the_first_event_are_one_write_and_http_1_0_has_no_chunks() -> None:
    async def run() -> None:
        for version, body in ((b"1.1", chunk(b"first")), (b"1.0", b"first")):
            protocol, transport = connection(stream)
            protocol.data_received(REQUEST.replace(b"1.1", version))
            await settle()
            head, _, rest = transport.written.partition(b"\r\n\r\n")
            assert rest == body
            assert (b"transfer-encoding: chunked" in head) == (version == b"1.1")
            protocol.write(b"second")
            assert transport.written.endswith(chunk(b"second") if version == b"1.1" else b"second")
            await end_tasks()

    asyncio.run(run())


class Absent:
    """A listener to whom nothing matters."""

    def on_disconnect(self) -> None: ...
    def on_pause(self) -> None: ...
    def on_resume(self) -> None: ...


def test_a_reply_goes_on_when_the_application_has_returned() -> None:
    async def leave(http: HttpRequest) -> None:
        http.sink.listen(Absent())

    async def run() -> None:
        protocol, transport = connection(leave)
        protocol.data_received(REQUEST + REQUEST)
        await settle()
        assert (transport.end, transport.written) == ("", b"")
        protocol.send(b"first", last=True)
        await settle()
        protocol.send(b"second", last=True)
        assert transport.written.count(b"HTTP/1.1 200") == 2
        assert transport.written.endswith(chunk(b"second") + b"0\r\n\r\n")
        protocol.connection_lost(None)

    asyncio.run(run())


def test_an_application_that_returns_without_a_reply_loses_the_connection() -> None:
    async def forget(http: HttpRequest) -> None: ...

    async def fail(http: HttpRequest) -> None:
        raise ValueError

    async def run() -> None:
        protocol, transport = connection(forget)
        protocol.data_received(REQUEST)
        await settle()
        assert (transport.end, transport.written) == ("close", b"")
        protocol, transport = connection(fail)
        protocol.data_received(REQUEST)
        await settle()
        assert (transport.end, transport.written[:12]) == ("close", b"HTTP/1.1 500")

    asyncio.run(run())


def test_a_reply_is_framed_for_its_own_request_not_for_the_next_one() -> None:
    async def run() -> None:
        protocol, transport = connection(stream)
        protocol.data_received(REQUEST)
        await settle()
        protocol.data_received(REQUEST.replace(b"1.1", b"1.0"))
        protocol.send(b"second", last=False)
        assert transport.written.endswith(chunk(b"second"))
        protocol.send(b"third", last=True)
        await settle()
        _, _, reply = transport.written.partition(b"0\r\n\r\n")
        assert reply.startswith(b"HTTP/1.1 200 OK\r\n")
        assert reply.endswith(b"connection: close\r\n\r\nfirst")
        await end_tasks()

    asyncio.run(run())


def test_what_waits_in_the_transport_is_half_of_a_small_backlog_at_most() -> None:
    async def run() -> None:
        state = ServerState(limits=Limits(max_backlog=4096))
        assert connection(state=state)[1].high_water == 2048
        assert connection()[1].high_water == 16 * 1024

    asyncio.run(run())


def test_a_socket_is_lent_while_chunks_may_go_to_it_and_it_is_this_connections() -> None:
    async def run() -> None:
        with socket.socket() as own:
            protocol, transport = connection(stream, socket=own)
            protocol.data_received(REQUEST)
            await settle()
            assert protocol.write_target is not None
            assert protocol.write_target.descriptor == own.fileno()
            transport.unread = 1
            assert protocol.write_target is None, "what was written before comes first"
            transport.unread = 0
            protocol.connection_lost(None)
            assert protocol.write_target is None, "the next connection may have it"
            protocol, _ = connection(stream, socket=own)
            protocol.data_received(REQUEST.replace(b"1.1", b"1.0"))
            await settle()
            assert protocol.write_target is None, "the client knows no chunks"
            assert connection(stream, socket=own, sslcontext=object())[0].write_target is None
            assert connection(stream)[0].write_target is None
            await end_tasks()

    asyncio.run(run())


@pytest.mark.parametrize("requests", [b"", REQUEST[:10], REQUEST, 3 * REQUEST])
def test_a_connection_that_ended_needs_no_garbage_collector(requests: bytes) -> None:
    """Whatever it was doing: a busy server collects late, and would grow with every client that leaves."""

    async def wait_for_the_end(http: HttpRequest) -> None:
        await http.gone()

    async def run(app: App) -> weakref.ref[ServerProtocol]:
        protocol, _ = connection(app)
        kept = weakref.ref(protocol)
        if requests:
            protocol.data_received(requests)
        await settle()
        protocol.connection_lost(None)
        del protocol
        await settle()
        return kept

    gc.disable()
    try:
        for app in (answer, wait_for_the_end):
            assert asyncio.run(run(app))() is None
    finally:
        gc.enable()


def test_connections_with_tiny_chunks_share_the_rounds_of_the_event_loop() -> None:
    """However many there are, a round decodes no more chunks, and each connection has its turn."""
    chunks, many = CHUNKS_PER_TURN + 1, 40
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def test() -> None:
        state = ServerState()
        bodies: list[bytes] = []

        async def read(http: HttpRequest) -> None:
            bodies.append(await http.read_body(1 << 20, lambda limit: ApiError(413, "")))
            await http.reply_json(b"{}")

        for _ in range(many):
            protocol, _ = connection(read, state)
            protocol.data_received(head + b"1\r\nx\r\n" * chunks + b"0\r\n\r\n")
        assert state.chunk_rounds.left <= 0
        rounds = 0
        while len(bodies) < many:
            await asyncio.sleep(0)
            assert state.chunk_rounds.left > -CHUNKS_PER_TURN
            rounds += 1
            assert rounds < 1000
        assert rounds >= many * chunks // CHUNKS_PER_ROUND
        assert set(bodies) == {b"x" * chunks}

    asyncio.run(test())


@pytest.mark.parametrize("sent", [b"", b"more", b"x" * 1000], ids=["no body", "a part of the body", "all"])
@pytest.mark.parametrize("ends", ["lost", "cut"])
def test_a_connection_that_ends_within_its_request_holds_none_of_its_bytes(sent: bytes, ends: str) -> None:
    async def run() -> None:
        state = ServerState()
        protocol, _ = connection(stream, state)
        protocol.data_received(b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n" + sent)
        await settle()
        assert state.budget.held == len(sent)
        if ends == "cut":
            protocol.cut()
        protocol.connection_lost(None)
        await settle()
        assert state.budget.held == 0
        await end_tasks()

    asyncio.run(run())


def test_work_for_a_client_that_leaves_is_cancelled() -> None:
    ends: list[str] = []

    async def work(seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise
        return "result"

    async def app(http: HttpRequest) -> None:
        assert await http.read_part() == b"{}"
        assert await http.unless_gone(work(0.0)) == "result"
        with pytest.raises(ValueError, match="of the work"):
            await http.unless_gone(failing())
        ends.append("waits")
        with pytest.raises(ClientGone):
            await http.unless_gone(work(3600.0))

    async def failing() -> None:
        raise ValueError("a fault of the work")

    async def run() -> None:
        protocol, _ = connection(app)
        protocol.data_received(b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        while not ends:
            await settle()
        protocol.connection_lost(None)
        await settle()
        assert ends == ["waits", "cancelled"]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_what_is_kept_of_a_body_that_is_read_stays_counted() -> None:
    held = []

    async def run() -> None:
        state = ServerState()

        async def app(http: HttpRequest) -> None:
            for kept in (3, 0):
                await http.read_part()
                http.sink.release(kept)
                held.append(state.budget.held)
            await http.reply_json(b"{}")

        protocol, _ = connection(app, state)
        for part in (b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 8\r\n\r\n1234", b"5678"):
            protocol.data_received(part)
            await settle()
        await end_tasks()

    asyncio.run(run())
    assert held == [3, 0]
