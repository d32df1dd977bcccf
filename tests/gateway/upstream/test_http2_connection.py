"""Replies of model servers over HTTP/2, from a server made with another library, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import h2.errors
import h2.settings
import pytest
import uvloop

from penstock.gateway.upstream.connection_pool import ConnectionPool
from penstock.gateway.upstream.exchange import Exchange, Failure, UpstreamError, UpstreamRequest
from penstock.gateway.upstream.http2_exchange import WINDOW
from penstock.gateway.upstream.timeouts import Timeouts
from penstock.gateway.upstream.upstream import Upstream
from tests.gateway.upstream.http2_server import Server, Stream, http2_server
from tests.gateway.upstream.receivers import WAIT_S, Collected

REQUEST = UpstreamRequest(b"POST", b"/x?y", [(b"a", b"b"), (b"host", b"other")], b"body")
SETTINGS = h2.settings.SettingCodes


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(WAIT_S):
            await main()

    uvloop.run(limited())


@asynccontextmanager
async def pool_to(server: Server, silence_s: float = 60.0) -> AsyncIterator[ConnectionPool]:
    timeouts = Timeouts(connect=WAIT_S, event=silence_s)
    pool = ConnectionPool(server.url, Upstream(timeouts, http2="require"))
    try:
        yield pool
    finally:
        pool.close()


async def ask(pool: ConnectionPool, request: UpstreamRequest = REQUEST) -> tuple[Collected, Exchange]:
    """A request that is sent; its reply is on its way."""
    exchange = await pool.acquire()
    collected = Collected()
    exchange.send(request, collected)
    return collected, exchange


async def until(collected: Collected, condition: Callable[[], bool]) -> None:
    while not condition():
        collected.changed.clear()
        await collected.changed.wait()


def test_whole_replies() -> None:
    async def answer(stream: Stream) -> None:
        await stream.complete.wait()
        assert dict(stream.headers)[b":path"] == b"/x?y"
        assert dict(stream.headers)[b"content-length"] == b"4"
        assert b"host" not in dict(stream.headers)
        assert dict(stream.headers)[b":authority"] == stream.connection.server.url[7:].encode()
        stream.connection.h2.send_headers(stream.stream_id, [(b":status", b"103")])
        stream.send_head([(b":status", b"200"), (b"x-a", b"1")])
        await stream.send(stream.body)
        stream.connection.h2.send_headers(stream.stream_id, [(b"trailer", b"1")], end_stream=True)
        stream.connection.flush()

    async def main() -> None:
        async with http2_server(answer) as server, pool_to(server) as pool:
            replies = [(await ask(pool))[0] for _ in range(3)]
            for reply in replies:
                assert await reply.until_end() == "end"
                assert (reply.status, reply.headers, reply.body) == (200, [(b"x-a", b"1")], b"body")
            assert len(server.connections) == 1

    run(main)


def test_a_server_that_wants_no_header_table_is_told_that_none_is_used() -> None:
    """Decoders insist on it (RFC 7541 §4.2)."""

    async def answer(stream: Stream) -> None:
        await stream.complete.wait()
        stream.send_head(end=True)

    async def main() -> None:
        async with http2_server(answer) as server:
            server.settings = {SETTINGS.HEADER_TABLE_SIZE: 0}
            async with pool_to(server) as pool:
                for _ in range(2):
                    reply, _ = await ask(pool)
                    assert await reply.until_end() == "end"
                assert len(server.connections) == 1

    run(main)


def test_replies_without_a_body() -> None:
    async def answer(stream: Stream) -> None:
        stream.send_head([(b":status", b"200"), (b"content-length", b"5")], end=True)

    async def main() -> None:
        async with http2_server(answer) as server, pool_to(server) as pool:
            reply, _ = await ask(pool, UpstreamRequest(b"HEAD", b"/", [], b""))
            assert await reply.until_end() == "end"
            assert (reply.status, reply.body) == (200, b"")
            reply, _ = await ask(pool, UpstreamRequest(b"GET", b"/", [], b""))
            assert "content-length" in await reply.until_end()
            assert reply.failure is Failure.NETWORK

    run(main)


@pytest.mark.parametrize("initial_window", [1, 65_535, 1 << 20])
def test_large_bodies_in_both_directions(initial_window: int) -> None:
    size = 3000 if initial_window == 1 else 3 << 20

    async def answer(stream: Stream) -> None:
        await stream.complete.wait()
        stream.send_head()
        await stream.send(stream.body, end=True)

    async def main() -> None:
        settings = {SETTINGS.INITIAL_WINDOW_SIZE: initial_window}
        async with http2_server(answer, settings) as server, pool_to(server) as pool:
            bodies = [bytes([number]) * size for number in range(3)]
            replies = [(await ask(pool, UpstreamRequest(b"POST", b"/", [], body)))[0] for body in bodies]
            for body, reply in zip(bodies, replies, strict=True):
                assert await reply.until_end() == "end"
                assert reply.body == body

    run(main)


def test_a_slow_client_stops_its_own_stream_alone() -> None:
    sent = 0

    async def answer(stream: Stream) -> None:
        nonlocal sent
        stream.send_head()
        if dict(stream.headers)[b":path"] == b"/fast":
            await stream.send(b"x" * (4 << 20), end=True)
            return
        for _ in range(64):
            await stream.send(b"x" * 16_384)
            sent += 16_384
        stream.end()

    async def main() -> None:
        async with http2_server(answer) as server, pool_to(server) as pool:
            slow, exchange = await ask(pool)
            await until(slow, lambda: bool(slow.body))
            exchange.pause(slow)
            fast, _ = await ask(pool, UpstreamRequest(b"GET", b"/fast", [], b""))
            assert await fast.until_end() == "end"
            assert len(fast.body) == 4 << 20
            assert slow.end is None
            assert sent <= len(slow.body) <= 2 * WINDOW
            exchange.resume(slow)
            assert await slow.until_end() == "end"
            assert len(slow.body) == 1 << 20
            assert len(server.connections) == 1

    run(main)


def test_abort_ends_its_stream_alone() -> None:
    async def answer(stream: Stream) -> None:
        stream.send_head()
        await stream.send(b"first")
        if len(stream.connection.server.streams) > 1:
            await stream.connection.server.streams[0].reset.wait()
        else:
            await stream.reset.wait()
            return
        await stream.send(b"second", end=True)

    async def main() -> None:
        async with http2_server(answer) as server, pool_to(server) as pool:
            left, exchange = await ask(pool)
            await until(left, lambda: bool(left.body))
            other, _ = await ask(pool)
            await until(other, lambda: bool(other.body))
            exchange.abort()
            assert await other.until_end() == "end"
            assert other.body == b"firstsecond"
            assert (left.body, left.end) == (b"first", None)
            assert len(server.connections) == 1

    run(main)


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        (h2.errors.ErrorCodes.INTERNAL_ERROR, Failure.SERVER),
        (h2.errors.ErrorCodes.CANCEL, Failure.NETWORK),
        (h2.errors.ErrorCodes.NO_ERROR, Failure.NETWORK),
        (h2.errors.ErrorCodes.REFUSED_STREAM, Failure.UNPROCESSED),
        (99, Failure.NETWORK),
    ],
)
@pytest.mark.parametrize("begun", [False, True])
def test_a_stream_that_the_server_resets(code: int, failure: Failure, begun: bool) -> None:
    async def answer(stream: Stream) -> None:
        if begun:
            stream.send_head()
            await stream.send(b"first")
        stream.connection.h2.reset_stream(stream.stream_id, code)
        stream.connection.flush()

    async def main() -> None:
        async with http2_server(answer) as server, pool_to(server) as pool:
            reply, _ = await ask(pool)
            assert "reset the stream" in await reply.until_end()
            expected = Failure.NETWORK if begun and failure is Failure.UNPROCESSED else failure
            assert reply.failure is expected
            assert not server.connections[0].lost.is_set()

    run(main)


def test_goaway_ends_the_streams_that_were_not_processed_and_lets_the_others_go_on() -> None:
    async def answer(stream: Stream) -> None:
        stream.send_head()
        await stream.send(b"first")
        await go_on.wait()
        await stream.send(b"second", end=True)

    async def main() -> None:
        nonlocal go_on
        go_on = asyncio.Event()
        async with http2_server(answer) as server, pool_to(server) as pool:
            replies = [(await ask(pool))[0] for _ in range(3)]
            for reply in replies:
                await until(reply, lambda reply=reply: bool(reply.body))  # type: ignore[misc]
            first = server.connections[0]
            first.transport.write(b"\0\0\x08\x07\0\0\0\0\0" + b"\0\0\0\x03" + b"\0\0\0\0")  # GOAWAY, 3
            assert "not processed" in await replies[2].until_end()
            assert replies[2].failure is Failure.UNPROCESSED
            again, _ = await ask(pool)
            go_on.set()
            assert await again.until_end() == "end"
            for reply in replies[:2]:
                assert await reply.until_end() == "end"
                assert reply.body == b"firstsecond"
            assert len(server.connections) == 2
            await first.lost.wait()

    go_on: asyncio.Event
    run(main)


def test_a_lost_connection_breaks_all_its_streams() -> None:
    async def answer(stream: Stream) -> None:
        stream.send_head()
        await stream.send(b"first")

    async def main() -> None:
        async with http2_server(answer) as server, pool_to(server) as pool:
            replies = [(await ask(pool))[0] for _ in range(200)]
            for reply in replies:
                await until(reply, lambda reply=reply: bool(reply.body))  # type: ignore[misc]
            for connection in server.connections:
                connection.transport.abort()
            for reply in replies:
                await reply.until_end()
                assert reply.failure is Failure.NETWORK

    run(main)


@pytest.mark.parametrize(
    ("last_words", "failure"),
    [
        (b"", Failure.IDLE_CLOSED),
        (b"\0\0\x08\x07\0\0\0\0\0" + b"\0\0\0\x01" + b"\0\0\0\0", Failure.UNPROCESSED),
        (b"\0\0\x08\x07\0\0\0\0\0" + b"\0\0\0\x03" + b"\0\0\0\0", Failure.NETWORK),
        (b"\0\0\x08\x06\0\0\0\0\0" + bytes(8), Failure.NETWORK),
        (b"\0\0\x04\x01\x04\0\0\0\x03" + b"\xff" * 4, Failure.NETWORK),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", Failure.NETWORK),
    ],
    ids=["nothing", "goaway without it", "goaway with it", "ping", "malformed reply", "no HTTP/2"],
)
def test_a_server_that_says_anything_has_not_closed_an_idle_connection(
    last_words: bytes, failure: Failure
) -> None:
    async def answer(stream: Stream) -> None:
        if stream.stream_id == 1:
            stream.send_head(end=True)
        else:
            stream.connection.transport.write(last_words)
            stream.connection.transport.close()

    async def main() -> None:
        async with http2_server(answer) as server, pool_to(server) as pool:
            reply, _ = await ask(pool)
            assert await reply.until_end() == "end"
            reply, _ = await ask(pool)
            await reply.until_end()
            assert reply.failure is failure

    run(main)


def test_streams_share_few_connections_and_limits_open_more() -> None:
    async def answer(stream: Stream) -> None:
        stream.send_head()
        await go_on.wait()
        stream.end()

    async def main() -> None:
        nonlocal go_on
        go_on = asyncio.Event()
        for limit, connections in ((1000, 8), (5, 80)):
            go_on.clear()
            settings = {SETTINGS.MAX_CONCURRENT_STREAMS: limit}
            async with http2_server(answer, settings) as server, pool_to(server) as pool:
                replies = await asyncio.gather(*(ask(pool) for _ in range(400)))
                for reply, _ in replies:
                    await until(reply, lambda reply=reply: reply.status == 200)  # type: ignore[misc]
                assert len(server.connections) <= connections
                go_on.set()
                for reply, _ in replies:
                    assert await reply.until_end() == "end"

    go_on: asyncio.Event
    run(main)


def test_a_server_that_allows_no_streams_is_none() -> None:
    async def answer(stream: Stream) -> None: ...

    async def main() -> None:
        none = {SETTINGS.MAX_CONCURRENT_STREAMS: 0}
        async with http2_server(answer, none) as server, pool_to(server) as pool:
            with pytest.raises(UpstreamError, match="no streams"):
                await pool.acquire()

    run(main)


def test_a_silent_connection_is_found_out() -> None:
    async def answer(stream: Stream) -> None:
        stream.send_head()
        stream.connection.server.deaf = True

    async def main() -> None:
        async with http2_server(answer) as server, pool_to(server, silence_s=0.2) as pool:
            reply, _ = await ask(pool)
            assert "silent" in await reply.until_end()
            assert reply.failure is Failure.NETWORK
            server.deaf = False
            assert reply.status == 200

    run(main)


def test_a_quiet_connection_that_answers_a_ping_goes_on() -> None:
    async def answer(stream: Stream) -> None:
        stream.send_head()
        while stream.connection.h2 and not stream.reset.is_set():
            await asyncio.sleep(0.05)
            if stream.connection.pinged >= 3:
                stream.end()
                return

    async def main() -> None:
        async with http2_server(answer) as server, pool_to(server, silence_s=0.1) as pool:
            reply, _ = await ask(pool)
            assert await reply.until_end() == "end"

    run(main)


def test_an_early_answer_ends_the_upload() -> None:
    async def answer(stream: Stream) -> None:
        stream.send_head([(b":status", b"413")], end=True)

    async def main() -> None:
        settings = {SETTINGS.INITIAL_WINDOW_SIZE: 1000}
        async with http2_server(answer, settings) as server, pool_to(server) as pool:
            reply, _ = await ask(pool, UpstreamRequest(b"POST", b"/", [], bytes(1 << 20)))
            assert await reply.until_end() == "end"
            assert reply.status == 413
            await server.streams[0].reset.wait()

    run(main)
