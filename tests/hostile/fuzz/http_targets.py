"""What parses HTTP: the server's protocol on a fake connection, and the gateway's client of model servers."""

from __future__ import annotations

import asyncio
import atexit
import re
import socket
from typing import Any

from penstock.gateway.upstream.connection_pool import ConnectionPool
from penstock.gateway.upstream.exchange import Failure, Headers, UpstreamRequest
from penstock.gateway.upstream.timeouts import Timeouts
from penstock.gateway.upstream.upstream import Upstream
from penstock.http.errors import ApiError
from penstock.http.http2.frames import settings_frame
from penstock.http.request import ClientGone, HttpRequest
from tests.hostile.fuzz.byte_source import ByteSource
from tests.hostile.fuzz.failures import logged
from tests.http.connections import FakeTransport, connection

TURNS = 8
"""Iterations of the event loop without a change after which nothing more happens."""
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
LOOP = asyncio.new_event_loop()
_connected = socket.socketpair()
"""The client asks the system what of a request the server has not got."""
for _kept in (LOOP, *_connected):  # for all inputs
    atexit.register(_kept.close)


async def received_body(http: HttpRequest) -> bytes | None:
    """A request's body; None if the client has left, or if the rest does not come, which is answered."""
    body = b""
    try:
        while part := await http.read_part():
            body += part
    except ApiError as error:
        await http.reply_error(error)
        return None
    except ClientGone:
        return None
    return body


class Served:
    """What one connection's application saw, and what was written."""

    def __init__(self) -> None:
        self.requests: list[tuple[Any, ...]] = []
        self.started = 0
        self.written = b""
        self.statuses: list[int] = []
        self.ended = ""

    async def app(self, http: HttpRequest) -> None:
        """Reads the body and answers."""
        self.started += 1
        body = await received_body(http)
        if body is None:
            return
        seen = http.method, http.raw_path, http.query, tuple(http.headers), body
        self.requests.append(seen)
        await http.reply_json(b"{}")


async def _settle(transport: FakeTransport, served: Served) -> None:
    quiet, before = 0, (-1, -1)
    while quiet < TURNS:
        await asyncio.sleep(0)
        now = len(transport.written), served.started
        quiet, before = (quiet + 1 if now == before else 0), now


async def serve(pieces: list[bytes]) -> Served:
    """One connection that receives ``pieces`` and then closes."""
    served = Served()

    async def app(http: HttpRequest) -> None:
        await served.app(http)

    protocol, transport = connection(app)
    for piece in pieces:
        if transport.is_closing():
            break
        if piece:
            protocol.data_received(piece)
        await _settle(transport, served)
    served.ended = transport.end
    protocol.connection_lost(None)
    await _settle(transport, served)
    served.written = transport.written
    served.statuses = [int(status) for status in _STATUS.findall(transport.written)]
    return served


def http_server(data: bytes) -> None:
    """A request stream. However it is cut, the application sees the same requests, and each that it sees gets
    one reply; what is no request gets one refusal, and the connection closes."""
    source = ByteSource(data)
    cut_at, stream = source.take(8), source.rest()
    with logged("penstock.http.http1.connection", "asyncio") as failures:
        whole = LOOP.run_until_complete(serve([stream]))
        cut = LOOP.run_until_complete(serve(ByteSource(cut_at).pieces(stream, 3)))
    assert not failures, failures
    for served in (whole, cut):
        finals = [status for status in served.statuses if status >= 200]
        assert 500 not in finals, served.written
        assert len(finals) <= served.started + 1, served.written
        assert len(finals) >= len(served.requests) or served.ended, (served.requests, served.written)
        assert not served.written or served.written.startswith(b"HTTP/1.1 "), served.written
    assert whole.requests == cut.requests, (whole.requests, cut.requests)


class _Reply:
    """A receiver of the gateway's client."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Headers = []
        self.body = b""
        self.ends: list[str] = []

    def on_head(self, status: int, headers: Headers) -> None:
        assert not self.ends
        self.status, self.headers = status, list(headers)

    def on_body(self, data: bytes, now: float) -> None:
        assert not self.ends
        self.body += data

    def on_end(self) -> None:
        self.ends.append("end")

    def on_broken(self, reason: str, failure: Failure) -> None:
        self.ends.append("broken")


def _relayed(request: UpstreamRequest, pieces: list[bytes]) -> tuple[_Reply, _Reply]:
    """The replies to two requests over one connection, the second if the first leaves it usable."""
    pool = ConnectionPool("http://model-server:80", Upstream(Timeouts(connect=1.0)))
    upstream = pool.make_http1()
    transport = FakeTransport()
    transport.extra["socket"] = _connected[0]
    upstream.connection_made(transport)
    first, second = _Reply(), _Reply()
    upstream.send(request, first)
    receiver = first
    for piece in pieces:
        if transport.is_closing():
            break
        if piece:
            upstream.data_received(piece)
        if first.ends and receiver is first and upstream.usable:
            receiver = second
            upstream.send(request, second)
    if not transport.is_closing():
        upstream.eof_received()
    upstream.connection_lost(None)
    return first, second


def http_client(data: bytes) -> None:
    """Bytes of a model server. Every reply ends exactly once, and its head and body do not depend on how its
    bytes were cut."""
    source = ByteSource(data)
    request = UpstreamRequest(b"HEAD" if source.byte() == 1 else b"POST", b"/", [], b"")
    cut_at, stream = source.take(8), source.rest()

    async def both() -> tuple[_Reply, _Reply, _Reply]:
        first, second = _relayed(request, [stream])
        cut, _ = _relayed(request, ByteSource(cut_at).pieces(stream, 3))
        await asyncio.sleep(0)  # what was sent on a closed connection is told in the next iteration
        return first, second, cut

    first, second, cut = LOOP.run_until_complete(both())
    for reply in (first, cut):
        assert len(reply.ends) == 1, reply.ends
    assert len(second.ends) <= 1, second.ends
    assert cut.body.startswith(first.body) or first.body.startswith(cut.body), (first.body, cut.body)
    if first.ends == cut.ends == ["end"]:
        assert (first.status, first.headers, first.body) == (cut.status, cut.headers, cut.body)


async def _relayed_over_http2(pieces: list[bytes]) -> list[_Reply]:
    """The replies to two requests over one connection."""
    connection = ConnectionPool("http://model-server:80", Upstream(Timeouts(connect=1.0))).make_http2()
    transport = FakeTransport()
    connection.connection_made(transport)
    connection.data_received(settings_frame({}))
    replies = [_Reply(), _Reply()]
    for reply in replies:
        connection.open_exchange().send(UpstreamRequest(b"POST", b"/", [], b"body"), reply)
    for piece in pieces:
        connection.data_received(piece)
        while connection._waits_for_turn:  # noqa: ASYNC110 - it depends on time how many turns it takes
            await asyncio.sleep(0)
    connection.connection_lost(None)
    for _ in range(TURNS):
        await asyncio.sleep(0)
    assert connection.active == 0
    return replies


def http2_client(data: bytes) -> None:
    """Bytes of a model server over HTTP/2. Every reply ends exactly once, and its head and body do not depend
    on how its bytes were cut."""
    source = ByteSource(data)
    cut_at, stream = source.take(8), source.rest()

    async def both() -> tuple[list[_Reply], list[_Reply]]:
        whole = await _relayed_over_http2([stream])
        return whole, await _relayed_over_http2(ByteSource(cut_at).pieces(stream, 3))

    for reply, cut in zip(*LOOP.run_until_complete(both()), strict=True):
        assert len(reply.ends) == len(cut.ends) == 1, (reply.ends, cut.ends)
        assert (reply.ends, reply.status, reply.headers) == (cut.ends, cut.status, cut.headers)
        assert reply.body == cut.body
