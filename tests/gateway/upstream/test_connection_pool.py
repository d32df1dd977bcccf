"""Which version of HTTP a server speaks: found out once, and again when it may be another server."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import cast

import pytest
import uvloop

from penstock.gateway.upstream import connection_pool
from penstock.gateway.upstream.connection_pool import ConnectionPool
from penstock.gateway.upstream.exchange import Exchange, UpstreamError, UpstreamRequest
from penstock.gateway.upstream.http1_connection import Http1UpstreamConnection
from penstock.gateway.upstream.http2_exchange import Http2Exchange
from penstock.gateway.upstream.timeouts import Timeouts
from penstock.gateway.upstream.tls import UpstreamTls
from penstock.gateway.upstream.upstream import Http2Policy, Upstream
from penstock.http.http2.frames import PREFACE
from tests.certificates import Certificates
from tests.gateway.upstream.http2_server import Stream, http2_server
from tests.gateway.upstream.receivers import WAIT_S, Collected

REQUEST = UpstreamRequest(b"POST", b"/x", [(b"a", b"b")], b"body")
BAD_REQUEST = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(WAIT_S):
            await main()

    uvloop.run(limited())


class Http1Server(asyncio.Protocol):
    """Answers HTTP/1.1 with 200, and the beginning of HTTP/2 in one of the ways of HTTP/1.1 servers."""

    prefaces = 0
    requests = 0
    to_preface: bytes | None = BAD_REQUEST
    """None: silence."""
    to_request = OK

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        kind = type(self)
        if data.startswith(PREFACE[:3]):
            kind.prefaces += 1
            if kind.to_preface is not None:
                self.transport.write(kind.to_preface)
                self.transport.close()
        else:
            kind.requests += 1
            self.transport.write(kind.to_request)
            if kind.to_request is not OK:
                self.transport.close()


@asynccontextmanager
async def http1_server(
    to_preface: bytes | None = BAD_REQUEST, port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[str, type[Http1Server]]]:
    kind = type("Served", (Http1Server,), {"to_preface": to_preface})
    listening = await asyncio.get_running_loop().create_server(kind, "127.0.0.1", port, ssl=tls)
    scheme = "http" if tls is None else "https"
    try:
        yield f"{scheme}://127.0.0.1:{listening.sockets[0].getsockname()[1]}", kind
    finally:
        listening.close()


@asynccontextmanager
async def pool_to(
    url: str, http2: Http2Policy = "auto", tls: UpstreamTls | None = None
) -> AsyncIterator[ConnectionPool]:
    pool = ConnectionPool(url, Upstream(Timeouts(connect=WAIT_S), http2=http2, tls=tls or UpstreamTls()))
    try:
        yield pool
    finally:
        pool.close()
        await asyncio.sleep(0)


async def ask(pool: ConnectionPool) -> tuple[Collected, Exchange]:
    exchange = await pool.acquire()
    collected = Collected()
    exchange.send(REQUEST, collected)
    assert await collected.until_end() == "end"
    assert collected.body == b"ok"
    return collected, exchange


async def answer(stream: Stream) -> None:
    await stream.complete.wait()
    stream.send_head()
    await stream.send(b"ok", end=True)


def test_a_server_that_speaks_http2_is_found_by_the_first_request() -> None:
    async def main() -> None:
        async with http2_server(answer) as server, pool_to(server.url) as pool:
            exchanges = await asyncio.gather(*(ask(pool) for _ in range(20)))
            assert all(isinstance(each, Http2Exchange) for _, each in exchanges)
            assert len(server.connections) == 1

    run(main)


@pytest.mark.parametrize("to_preface", [BAD_REQUEST, b"", b"nonsense", b"\0" * 9, OK], ids=repr)
def test_a_server_of_http1_is_asked_once(to_preface: bytes) -> None:
    async def main() -> None:
        async with http1_server(to_preface) as (url, server), pool_to(url) as pool:
            for _ in range(3):
                _, exchange = await ask(pool)
                assert isinstance(exchange, Http1UpstreamConnection)
            assert (server.prefaces, server.requests) == (1, 3)

    run(main)


def test_the_version_is_told_once_the_server_has_spoken(caplog: pytest.LogCaptureFixture) -> None:
    """What closes connections without a word may be dead, or a port of TLS."""
    caplog.set_level(logging.INFO)

    def told() -> list[str]:
        return [text.partition(" speaks ")[2] for text in caplog.messages if " speaks " in text]

    async def main() -> None:
        async with http1_server(b"") as (url, server), pool_to(url) as pool:
            server.to_request = b""
            for _ in range(3):
                exchange = await pool.acquire()
                collected = Collected()
                exchange.send(REQUEST, collected)
                assert await collected.until_end() != "end"
            assert not told()
            server.to_request = OK
            for _ in range(3):
                await ask(pool)
            assert told() == ["HTTP/1.1"]

    run(main)


def test_a_server_that_does_not_answer_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_pool, "PATIENCE_S", 0.01)
    monkeypatch.setattr(connection_pool, "HELLO_S", 0.05)
    monkeypatch.setattr(connection_pool, "SILENT_RETRY_S", 0.1)

    async def main() -> None:
        async with http1_server(None) as (url, server), pool_to(url) as pool:
            _, exchange = await ask(pool)
            assert isinstance(exchange, Http1UpstreamConnection)
            while server.prefaces < 2:  # it may have been busy
                _, exchange = await ask(pool)
                assert isinstance(exchange, Http1UpstreamConnection)
                await asyncio.sleep(0.01)

    run(main)


def test_off_and_require() -> None:
    async def main() -> None:
        async with http1_server() as (url, server):
            async with pool_to(url, "require") as pool:
                with pytest.raises(UpstreamError, match=r"does not speak HTTP/2.*require"):
                    await pool.acquire()
            assert server.prefaces == 1
            async with pool_to(url, "off") as pool:
                await ask(pool)
            assert (server.prefaces, server.requests) == (1, 1)
        async with http2_server(answer) as both, pool_to(both.url, "require") as pool:
            await ask(pool)

    run(main)


def test_another_server_at_the_same_address_is_asked_again() -> None:
    async def main() -> None:
        async with http1_server() as (url, server), pool_to(url) as pool:
            await ask(pool)
            pool._close_idle()
        async with pool_to(url) as pool:
            with pytest.raises(UpstreamError, match="no connection"):
                await pool.acquire()
            port = int(url.rpartition(":")[2])
            async with http2_server(answer, port=port) as upgraded:
                _, exchange = await ask(pool)
                assert isinstance(exchange, Http2Exchange)
                upgraded.connections[0].transport.abort()
                await upgraded.connections[0].lost.wait()
            async with http1_server(port=port) as (_, server):
                while True:
                    try:
                        _, exchange = await ask(pool)
                    except UpstreamError:
                        continue
                    break
                assert isinstance(exchange, Http1UpstreamConnection)
                assert server.prefaces == 1

    run(main)


def test_a_server_that_speaks_http1_no_longer_is_asked_again() -> None:
    """It was replaced while nobody tried to connect, so no connection was refused."""

    async def main() -> None:
        async with http1_server() as (url, _):
            pool = ConnectionPool(url, Upstream(Timeouts(connect=WAIT_S)))
            await ask(pool)
            pool._close_idle()
        async with http2_server(answer, port=int(url.rpartition(":")[2])):
            exchange = await pool.acquire()
            assert isinstance(exchange, Http1UpstreamConnection)
            collected = Collected()
            exchange.send(REQUEST, collected)
            assert await collected.until_end() != "end"
            _, exchange = await ask(pool)
            assert isinstance(exchange, Http2Exchange)
            pool.close()

    run(main)


def test_a_server_that_breaks_a_reply_is_not_asked_again() -> None:
    async def main() -> None:
        async with http1_server() as (url, server), pool_to(url) as pool:
            await ask(pool)
            pool._close_idle()
            server.to_request = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"
            for _ in range(2):
                exchange = await pool.acquire()
                collected = Collected()
                exchange.send(REQUEST, collected)
                assert await collected.until_end() != "end"
            assert server.prefaces == 1

    run(main)


@pytest.mark.parametrize("protocols", [["h2", "http/1.1"], ["http/1.1"], []])
def test_tls_chooses(protocols: list[str], certificates: Certificates) -> None:
    made, trusting = certificates, UpstreamTls(ca_file=certificates.authority)
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(made.chain, made.key)
    if protocols:
        served.set_alpn_protocols(protocols)

    async def main() -> None:
        if "h2" in protocols:
            async with http2_server(answer, tls=served) as server, pool_to(server.url, tls=trusting) as pool:
                exchanges = await asyncio.gather(*(ask(pool) for _ in range(5)))
                assert all(isinstance(each, Http2Exchange) for _, each in exchanges)
                assert len(server.connections) == 1
            return
        async with http1_server(tls=served) as (url, plain):
            async with pool_to(url, tls=trusting) as pool:
                for _ in range(3):
                    _, exchange = await ask(pool)
                    assert isinstance(exchange, Http1UpstreamConnection)
            assert plain.prefaces == 0
            async with pool_to(url, "require", trusting) as pool:
                with pytest.raises(UpstreamError, match="require"):
                    await pool.acquire()

    run(main)


def test_a_stream_that_requires_http1_moves_the_server_to_it() -> None:
    async def require_http1(stream: Stream) -> None:
        stream.connection.h2.reset_stream(stream.stream_id, 13)
        stream.connection.flush()

    async def main() -> None:
        async with http2_server(require_http1) as server, pool_to(server.url) as pool:
            exchange = await pool.acquire()
            collected = Collected()
            exchange.send(REQUEST, collected)
            assert "HTTP_1_1_REQUIRED" in await collected.until_end()
            assert isinstance(await pool.acquire(), Http1UpstreamConnection)

    run(main)


def test_a_connection_that_requires_http1_moves_the_server_to_it() -> None:
    settings_and_goaway = b"\0\0\0\x04" + bytes(5) + b"\0\0\x08\x07" + bytes(9) + b"\0\0\0\x0d"

    async def main() -> None:
        async with http1_server(settings_and_goaway) as (url, server), pool_to(url) as pool:
            for _ in range(2):
                _, exchange = await ask(pool)
                assert isinstance(exchange, Http1UpstreamConnection)
            assert server.prefaces == 1

    run(main)


@pytest.mark.parametrize("url", ["http://a..b:1", "https://.a:1", f"https://{'x' * 64}:1"])
def test_a_name_that_is_none_gets_no_connection(url: str) -> None:
    async def main() -> None:
        for http2 in ("auto", "off"):
            async with pool_to(url, http2) as pool:
                with pytest.raises(UpstreamError, match="no connection"):
                    await pool.acquire()

    run(main)
