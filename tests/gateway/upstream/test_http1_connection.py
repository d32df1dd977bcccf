"""Replies of model servers over real sockets, whole and broken."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress

import pytest
import uvloop

from penstock.gateway.upstream import http1_connection
from penstock.gateway.upstream.connection_pool import ConnectionPool
from penstock.gateway.upstream.exchange import (
    PIECE_BYTES,
    Failure,
    UpstreamError,
    UpstreamRequest,
    without_hop_by_hop,
)
from penstock.gateway.upstream.http1_connection import Http1UpstreamConnection, request_bytes
from penstock.gateway.upstream.timeouts import Timeouts
from penstock.gateway.upstream.upstream import Upstream
from penstock.http.http1.reply_reader import MAX_OVERHEAD_BYTES
from tests.gateway.upstream.receivers import WAIT_S, Collected

REQUEST = UpstreamRequest(b"POST", b"/x", [(b"a", b"b")], b"body")
REQUEST_BYTES = request_bytes(REQUEST, b"h")


Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def pool_to(peer: Peer) -> AsyncIterator[ConnectionPool]:
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        try:
            await peer(reader, writer)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    pool = ConnectionPool(f"http://127.0.0.1:{port}", Upstream(Timeouts(connect=WAIT_S), http2="off"))
    try:
        yield pool
    finally:
        pool.close()
        server.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


def answering(*replies: bytes, close: bool = True) -> Peer:
    """Reads one request for each reply, then closes or waits for the client to."""

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for reply in replies:
            if not await reader.read(1 << 16):
                break
            writer.write(reply)
        if not close:
            await reader.read()

    return peer


async def ask(pool: ConnectionPool) -> tuple[Collected, Http1UpstreamConnection]:
    connection = await pool.acquire()
    collected = Collected()
    connection.send(REQUEST, collected)
    await collected.until_end()
    return collected, connection


async def open_after_a_turn(connection: Http1UpstreamConnection) -> bool:
    """Lets the loop turn once; whether the connection is still open."""
    await asyncio.sleep(0)
    return connection.usable


OK = b"HTTP/1.1 200 OK\r\nX-A: 1\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.mark.parametrize("reply", [OK, CHUNKED, UNTIL_CLOSE, CONTINUE + OK])
def test_whole_replies(reply: bytes) -> None:
    async def main() -> None:
        async with pool_to(answering(reply)) as pool:
            collected, _ = await ask(pool)
            assert (collected.status, collected.body, collected.end) == (200, b"hello", "end")

    asyncio.run(main())


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        OK[:30],
        OK[:-1],
        CHUNKED[:-5],
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 5\r\n\r\nhello",
        CHUNKED.replace(b"\r\n\r\n", b"\r\ncontent-length: 5\r\n\r\n", 1),
        CHUNKED.replace(b"chunked", b"gzip, chunked"),
        CHUNKED.replace(b"chunked", b"gzip"),
    ],
)
def test_broken_replies(reply: bytes) -> None:
    async def main() -> None:
        async with pool_to(answering(reply)) as pool:
            collected, connection = await ask(pool)
            assert collected.end != "end"
            assert not connection.usable

    asyncio.run(main())


def test_connections_are_used_again() -> None:
    async def main() -> None:
        async with pool_to(answering(OK, CHUNKED, close=False)) as pool:
            _, first = await ask(pool)
            collected, second = await ask(pool)
            assert second is first
            assert collected.body == b"hello"
            third = await pool.acquire(fresh=True)
            assert third is not first
            third.abort()

    asyncio.run(main())


@pytest.mark.parametrize("more", [CHUNKED.replace(b"200 OK", b"418 No"), b"surplus"])
def test_what_follows_a_reply_is_no_part_of_it_and_ends_the_connection(more: bytes) -> None:
    async def main() -> None:
        async with pool_to(answering(OK + more, close=False)) as pool:
            collected, connection = await ask(pool)
            assert (collected.status, collected.body, collected.end) == (200, b"hello", "end")
            assert not connection.usable

    asyncio.run(main())


def test_a_connection_that_the_server_closed_is_not_used_again() -> None:
    async def main() -> None:
        async with pool_to(answering(OK)) as pool:
            _, first = await ask(pool)
            async with asyncio.timeout(WAIT_S):
                while await open_after_a_turn(first):
                    pass
            second = await pool.acquire()
            assert second is not first
            second.abort()

    asyncio.run(main())


def test_abort_tells_the_server() -> None:
    async def main() -> None:
        left = asyncio.Event()

        async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1 << 16)
            writer.write(OK[:-1])
            with suppress(ConnectionError):
                await reader.read()
            left.set()

        async with pool_to(peer) as pool, asyncio.timeout(WAIT_S):
            connection = await pool.acquire()
            collected = Collected()
            connection.send(REQUEST, collected)
            await collected.changed.wait()
            connection.abort()
            await left.wait()
            assert collected.end is None

    asyncio.run(main())


def test_nobody_listens() -> None:
    async def main() -> None:
        async with pool_to(answering()) as pool:
            pass
        with pytest.raises(UpstreamError, match="no connection"):
            await pool.acquire()

    asyncio.run(main())


def test_requests_on_the_wire() -> None:
    assert REQUEST_BYTES == b"POST /x HTTP/1.1\r\nhost: h\r\na: b\r\ncontent-length: 4\r\n\r\nbody"
    get = request_bytes(
        UpstreamRequest(b"GET", b"/", [(b"host", b"other"), (b"content-length", b"9")], b""), b"h"
    )
    assert get == b"GET / HTTP/1.1\r\nhost: h\r\n\r\n"


def test_headers_of_one_connection_are_not_passed_on() -> None:
    headers = [
        (b"connection", b"close, X-Mine"),
        (b"x-mine", b"1"),
        (b"transfer-encoding", b"chunked"),
        (b"a", b"b"),
    ]
    assert without_hop_by_hop(headers) == [(b"a", b"b")]


HEAD_REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"


async def _lost(connection: Http1UpstreamConnection) -> None:
    """Until the loop has said that the connection is closed."""
    async with asyncio.timeout(WAIT_S):
        while await open_after_a_turn(connection):
            pass


def test_a_connection_that_breaks_before_it_is_used_says_so() -> None:
    async def run() -> None:
        async with pool_to(answering(OK)) as pool:
            _, kept = await ask(pool)
            await _lost(kept)
            await asyncio.sleep(0)
            collected = Collected()
            kept.send(REQUEST, collected)
            assert "closed" in await collected.until_end()
            assert not kept._answered

    asyncio.run(run())


def test_the_reply_to_head_has_no_body() -> None:
    async def run() -> None:
        async with pool_to(answering(HEAD_REPLY, close=False)) as pool:
            connection = await pool.acquire()
            collected = Collected()
            connection.send(UpstreamRequest(b"HEAD", b"/x", [], b""), collected)
            assert await collected.until_end() == "end"
            assert (collected.status, collected.body) == (200, b"")

    asyncio.run(run())


def test_a_slow_client_of_an_earlier_reply_does_not_stop_the_next_one() -> None:
    async def run() -> None:
        async with pool_to(answering(OK, OK, close=False)) as pool:
            earlier, connection = await ask(pool)
            again = await pool.acquire()
            assert again is connection
            collected = Collected()
            again.send(REQUEST, collected)
            again.pause(earlier)
            assert await collected.until_end() == "end"

    asyncio.run(run())


def test_an_early_answer_ends_the_connection() -> None:
    """What of the request has not been read may never be."""

    async def run() -> None:
        async with pool_to(answering(OK, close=False)) as pool:
            connection = await pool.acquire()
            collected = Collected()
            connection.send(UpstreamRequest(b"POST", b"/x", [], bytes(64 << 20)), collected)
            assert await collected.until_end() == "end"
            assert not connection.usable

    asyncio.run(run())


def test_a_closed_pool_keeps_nothing() -> None:
    async def run() -> None:
        async with pool_to(answering(OK, close=False)) as pool:
            connection = await pool.acquire()
            collected = Collected()
            connection.send(REQUEST, collected)
            pool.close()
            assert await collected.until_end() == "end"
            assert not connection.usable

    asyncio.run(run())


def test_nobody_waits_for_the_server_to_expect_the_body() -> None:
    assert b"expect" not in request_bytes(
        UpstreamRequest(b"POST", b"/", [(b"expect", b"100-continue")], b"b"), b"h"
    )


@pytest.mark.parametrize(
    ("begin", "endless"),
    [
        (b"", CONTINUE),
        (b"HTTP/1.1 200 OK\r\n", b"a: b\r\n"),
        (b"HTTP/1.1 200 OK\r\na: ", b"x" * 1000),
        (CHUNKED[:-7] + b"0\r\n", b"a: b\r\n"),
        (CHUNKED[:-7] + b"0\r\na: ", b"x" * 1000),
        (CHUNKED[:-7] + b"2;a=", b"x" * 1000),
    ],
    ids=["interim replies", "headers", "a header", "trailers", "a trailer", "a chunk extension"],
)
def test_what_is_no_content_is_bounded(begin: bytes, endless: bytes) -> None:
    sent = 0

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.read(1 << 16)
        writer.write(begin)
        piece = endless * (65_536 // len(endless))
        with suppress(ConnectionError):
            while sent < 100 * MAX_OVERHEAD_BYTES:
                writer.write(piece)
                await writer.drain()
                sent += len(piece)

    async def main() -> None:
        async with pool_to(peer) as pool:
            collected, _ = await ask(pool)
            assert collected.end not in ("end", None)
            assert collected.body in (b"", b"hello")
            assert len(collected.headers) <= 1

    asyncio.run(main())
    assert sent < 100 * MAX_OVERHEAD_BYTES


@pytest.mark.parametrize(
    "reply",
    [b"HTTP/1.1 000 x\r\nContent-Length: 5\r\n\r\nhello", b"HTTP/1.1 101 x\r\nUpgrade: y\r\n\r\nhello"],
)
def test_a_reply_without_a_final_status_is_broken(reply: bytes) -> None:
    async def main() -> None:
        async with pool_to(answering(reply, close=False)) as pool:
            collected, _ = await ask(pool)
            assert (collected.status, collected.body) == (0, b"")
            assert collected.end not in ("end", None)

    asyncio.run(main())


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_flood_leaves_turns_to_others(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in turns of the loop: one per read whose processing takes long."""
    monkeypatch.setattr(http1_connection, "TURN_S", -1.0)
    size, reads, turns = 1 << 22, 0, 0

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size)
        await writer.drain()

    class Counting(Collected):
        def on_body(self, data: bytes, now: float) -> None:
            nonlocal reads
            reads += 1
            super().on_body(data, now)

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def main() -> None:
        async with pool_to(peer) as pool:
            connection = await pool.acquire()
            counting = asyncio.create_task(count())
            collected = Counting()
            connection.send(REQUEST, collected)
            assert await collected.until_end() == "end"
            counting.cancel()
            assert len(collected.body) == size
            assert turns >= reads - 1 > 1

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


def test_a_slow_client_stays_paused_when_its_turn_comes() -> None:
    async def main() -> None:
        async with pool_to(answering(OK[:-2], close=False)) as pool:
            connection = await pool.acquire()
            collected = Collected()
            connection.send(REQUEST, collected)
            async with asyncio.timeout(WAIT_S):
                await collected.changed.wait()
            connection._waits_for_turn = True
            connection.pause(collected)
            connection._take_turn()
            assert not connection._transport.is_reading()
            connection.resume(collected)
            assert connection._transport.is_reading()

    asyncio.run(main())


# -- large reads


class FakeTransport(asyncio.Transport):
    """A connection whose reads the test makes."""

    def __init__(self) -> None:
        super().__init__()
        self.reading = True
        self.closing = False

    def write(self, data: object) -> None: ...

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


class Pieces(Collected):
    """Remembers the sizes of what came."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def on_body(self, data: bytes, now: float) -> None:
        self.sizes.append(len(data))
        super().on_body(data, now)


LARGE = b"HTTP/1.1 200 OK\r\nContent-Length: 262144\r\n\r\n" + bytes(262_144)
"""A reply that comes in one read."""


@pytest.fixture
def slow_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every piece takes long."""
    monkeypatch.setattr(http1_connection, "TURN_S", -1.0)


def large_read(read: bytes = LARGE) -> tuple[Http1UpstreamConnection, FakeTransport, Pieces]:
    connection = ConnectionPool(
        "http://127.0.0.1:1", Upstream(Timeouts(connect=WAIT_S), http2="off")
    ).make_http1()
    transport, pieces = FakeTransport(), Pieces()
    connection.connection_made(transport)
    connection.send(REQUEST, pieces)
    connection.data_received(read)
    return connection, transport, pieces


@pytest.mark.usefixtures("slow_pieces")
def test_a_large_read_takes_turns() -> None:
    async def main() -> None:
        _, transport, pieces = large_read()
        turns = 0
        while pieces.end is None:
            assert not transport.reading
            assert len(pieces.sizes) == turns + 1, "one piece in a turn"
            await asyncio.sleep(0)
            turns += 1
        assert (pieces.end, pieces.body) == ("end", bytes(262_144))
        assert transport.reading
        assert max(pieces.sizes) <= PIECE_BYTES
        assert turns >= 262_144 // PIECE_BYTES

    asyncio.run(main())


@pytest.mark.usefixtures("slow_pieces")
@pytest.mark.parametrize("framed", [True, False])
def test_what_came_before_the_connection_was_lost_counts(framed: bool) -> None:
    """TLS reads on, and says so at once."""

    async def main() -> None:
        read = LARGE if framed else LARGE.replace(b"Content-Length: 262144", b"Connection: close")
        connection, transport, pieces = large_read(read)
        connection.eof_received()
        transport.close()
        connection.connection_lost(None)
        assert await pieces.until_end() == "end"
        assert pieces.body == bytes(262_144)

    asyncio.run(main())


@pytest.mark.usefixtures("slow_pieces")
def test_half_of_a_large_read_is_broken() -> None:
    async def main() -> None:
        connection, transport, pieces = large_read(LARGE[:100_000])
        transport.close()
        connection.connection_lost(ConnectionResetError("reset"))
        assert await pieces.until_end() == "reset"
        assert len(pieces.body) > 99_000

    asyncio.run(main())


@pytest.mark.usefixtures("slow_pieces")
def test_a_slow_client_stops_a_large_read() -> None:
    async def main() -> None:
        connection, transport, pieces = large_read()
        connection.pause(pieces)
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(pieces.sizes) == 1
        assert not transport.reading
        connection.resume(pieces)
        assert await pieces.until_end() == "end"
        assert pieces.body == bytes(262_144)

    asyncio.run(main())


@pytest.mark.usefixtures("slow_pieces")
def test_an_aborted_reply_gets_nothing_of_a_large_read() -> None:
    async def main() -> None:
        connection, _, pieces = large_read()
        connection.abort()
        for _ in range(10):
            await asyncio.sleep(0)
        assert (len(pieces.sizes), pieces.end) == (1, None)

    asyncio.run(main())


@pytest.mark.usefixtures("slow_pieces")
def test_what_follows_a_large_reply_ends_the_connection() -> None:
    async def main() -> None:
        connection, _, pieces = large_read(LARGE + bytes(10_000))
        assert await pieces.until_end() == "end"
        assert (pieces.body, connection.usable) == (bytes(262_144), False)

    asyncio.run(main())


@pytest.mark.parametrize(
    "late", [b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nother", b""], ids=["reply", "end"]
)
def test_a_connection_on_which_more_has_come_takes_no_request(late: bytes) -> None:
    """It may be the reply of somebody else, or the end; the event loop has not seen it yet."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            pool = ConnectionPool(url, Upstream(Timeouts(connect=WAIT_S), http2="off"))
            connection = await pool.acquire()
            peer, _ = listener.accept()
            with peer:
                collected = Collected()
                connection.send(REQUEST, collected)
                peer.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
                assert await collected.until_end() == "end"
                if late:
                    peer.sendall(late)
                else:
                    peer.shutdown(socket.SHUT_WR)
                assert pool.acquire_exchange() is None
            pool.close()

    uvloop.run(main())


async def closes_before(server: socket.socket, send: Callable[[], None]) -> None:
    """Its end of the connection is on the way when the request is."""
    server.close()
    send()


async def closes_after(server: socket.socket, send: Callable[[], None]) -> None:
    """As a process that the request has ended."""
    send()
    await asyncio.get_running_loop().sock_recv(server, 1 << 20)
    server.close()


async def closes_within(server: socket.socket, send: Callable[[], None]) -> None:
    send()
    await asyncio.get_running_loop().sock_recv(server, 10)
    server.close()


async def resets_after(server: socket.socket, send: Callable[[], None]) -> None:
    send()
    await asyncio.get_running_loop().sock_recv(server, 1 << 20)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    server.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize(
    ("ends", "failure"),
    [
        (closes_before, Failure.UNPROCESSED),
        (closes_after, Failure.IDLE_CLOSED),
        (closes_within, Failure.IDLE_CLOSED),
        (resets_after, Failure.IDLE_CLOSED),
    ],
)
def test_what_a_server_has_not_got_is_known(
    ends: Callable[[socket.socket, Callable[[], None]], Awaitable[None]],
    failure: Failure,
    run: Callable[[Coroutine[None, None, None]], None],
) -> None:
    """By what its system has acknowledged when it ended the connection."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            pool = ConnectionPool(url, Upstream(Timeouts(connect=WAIT_S), http2="off"))
            connection = await pool.acquire()
            server, _ = await loop.sock_accept(listener)
            server.setblocking(False)
            first, second = Collected(), Collected()
            connection.send(REQUEST, first)
            await loop.sock_recv(server, 1 << 20)
            await loop.sock_sendall(server, OK)
            assert await first.until_end() == "end"
            assert await pool.acquire() is connection
            await ends(server, lambda: connection.send(REQUEST, second))
            await second.until_end()
            assert second.failure is failure
            pool.close()

    run(main())
