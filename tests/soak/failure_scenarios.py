"""Model servers that fail in many ways, and clients that disconnect at any time."""

from __future__ import annotations

import asyncio
import enum
import random
import re
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Self, cast

import msgspec

from penstock.gateway.upstream.connection_pool import ConnectionPool
from penstock.gateway.upstream.exchange import Exchange, Failure, Headers, UpstreamError, UpstreamRequest
from penstock.gateway.upstream.timeouts import Timeouts
from penstock.gateway.upstream.upstream import Upstream


class Scenario(enum.StrEnum):
    """How a request goes. Its body names the scenario for the model server."""

    STREAM = enum.auto()
    WHOLE = enum.auto()
    UNKNOWN = enum.auto()
    """404, for a made-up model."""
    FAILED = enum.auto()
    """500."""
    UNREADY = enum.auto()
    """503."""
    ERROR_EVENT = enum.auto()
    RESET = enum.auto()
    """The connection breaks before the reply."""
    BROKEN = enum.auto()
    """The connection breaks within the stream."""
    TRUNCATED = enum.auto()
    """The stream ends without its terminator."""
    MALFORMED = enum.auto()
    CHARSET = enum.auto()
    STALLED = enum.auto()
    """There is no response."""
    LEAVES_AT_ONCE = enum.auto()
    """The client disconnects within 10 ms, before the first token."""
    LEAVES_WITHIN = enum.auto()
    """The client disconnects after the first token."""
    REFUSED = enum.auto()
    """The gateway rejects the body."""


WEIGHTS = dict.fromkeys(Scenario, 2) | {
    Scenario.STREAM: 120,
    Scenario.WHOLE: 80,
    Scenario.UNKNOWN: 20,
    Scenario.LEAVES_AT_ONCE: 20,
    Scenario.LEAVES_WITHIN: 20,
    Scenario.REFUSED: 10,
    Scenario.STALLED: 1,
}
"""Relative frequencies. Failures are rare, so that circuit breakers open now and then, but not always."""
NAMES = 300
"""Different prompts and sessions: the memory for them is full early in a run."""
MADE_UP = 5000
"""Number of different made-up models."""
TOKEN = b'data: {"choices":[{"index":0,"text":" a"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error":{"message":"engine gone"}}\n\n'
WHOLE = b'{"choices":[{"text":"a"}],"usage":{"prompt_tokens":3,"completion_tokens":2}}'
LOAD = b"vllm:num_requests_waiting 0\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream%b\r\ntransfer-encoding: chunked\r\n\r\n"
_KIND = re.compile(rb'"user":"(\w+)"')
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_OUTCOME = re.compile(r'^penstock_gateway_request_total\{.*outcome="(\w+)".*\} ([0-9.e+]+)$', re.MULTILINE)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _stream(*events: bytes, end: bytes = b"0\r\n\r\n", charset: bytes = b"") -> bytes:
    return STREAM_HEAD % charset + b"".join(map(_chunk, events)) + end


def _reply(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        status,
        len(body),
        body,
    )


REPLIES = {
    Scenario.STREAM: _stream(TOKEN, TOKEN, USAGE, DONE),
    Scenario.WHOLE: _reply(200, WHOLE),
    Scenario.UNKNOWN: _reply(404, b'{"error":{"message":"no such model"}}'),
    Scenario.FAILED: _reply(500, b'{"error":{"message":"out of memory"}}'),
    Scenario.UNREADY: _reply(503, b'{"error":{"message":"loading"}}'),
    Scenario.ERROR_EVENT: _stream(TOKEN, ERROR, DONE),
    Scenario.RESET: b"",
    Scenario.BROKEN: _stream(TOKEN, end=b""),
    Scenario.TRUNCATED: _stream(TOKEN, TOKEN),
    Scenario.MALFORMED: _stream(TOKEN, b"data: {\n\n", DONE),
    Scenario.CHARSET: _stream(TOKEN, DONE, charset=b"; charset=latin-1"),
    Scenario.STALLED: b"",
    Scenario.LEAVES_AT_ONCE: b"",
    Scenario.LEAVES_WITHIN: _stream(TOKEN, end=b""),
}
"""Responses of the model server."""
BREAKS = frozenset({Scenario.RESET, Scenario.BROKEN})
"""Scenarios after which it closes the connection."""


class _ModelServer(asyncio.Protocol):
    """One connection of the gateway."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._read = b""

    def data_received(self, data: bytes) -> None:
        self._read += data
        head, end, body = self._read.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if not end or (length is not None and len(body) < int(length.group(1))):
            return
        self._read = b""
        if head.startswith(b"GET "):
            self._transport.write(_reply(200, LOAD))
            return
        found = _KIND.search(body)
        assert found is not None, "every request names its kind"
        kind = Scenario(found.group(1).decode())
        self._transport.write(REPLIES[kind])
        if kind in BREAKS:
            self._transport.close()


class ModelServers:
    """Model servers in this process; use it as a context."""

    def __init__(self, count: int) -> None:
        self.urls: list[str] = []
        self._count = count
        self._servers: list[asyncio.Server] = []

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for _ in range(self._count):
            listener = socket.create_server(("127.0.0.1", 0))
            self.urls.append(f"http://127.0.0.1:{listener.getsockname()[1]}")
            self._servers.append(await loop.create_server(_ModelServer, sock=listener))
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()


class _Reply:
    """Receives one reply. ``leaves``: disconnects at its first byte."""

    def __init__(self, exchange: Exchange, *, leaves: bool) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.body = bytearray()
        self._exchange = exchange
        self._leaves = leaves

    def on_head(self, status: int, headers: Headers) -> None: ...

    def on_body(self, data: bytes, now: float) -> None:
        self.body += data
        if self._leaves:
            self._exchange.abort()
            self.on_end()

    def on_end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def on_broken(self, reason: str, failure: Failure) -> None:
        self.on_end()


class ScenarioClient:
    """Sends requests to the gateway at ``url``, one after the other."""

    def __init__(self, url: str, rng: random.Random) -> None:
        self._pool = ConnectionPool(url, Upstream(Timeouts(connect=30.0), http2="off"))
        self._rng = rng

    async def run(self, kinds: Iterator[Scenario]) -> None:
        """Sends requests of ``kinds``, an iterator that clients share."""
        for kind in kinds:
            await self._ask(kind)

    async def tracked_objects(self) -> int:
        """Objects tracked by the gateway's garbage collector."""
        report = msgspec.json.decode(await self._get(b"/debug/gc"))
        tracked: int = report["processes"]["gateway"]["tracked"]
        return tracked

    async def outcomes(self) -> Counter[str]:
        """The gateway's request counts by outcome."""
        counts: Counter[str] = Counter()
        for outcome, value in _OUTCOME.findall((await self._get(b"/metrics")).decode()):
            counts[outcome] += int(float(value))
        return counts

    def close(self) -> None:
        self._pool.close()

    async def _ask(self, kind: Scenario) -> None:
        name = self._rng.randrange(NAMES)
        model, prompt = "m", f"{name} " * 300
        if kind is Scenario.UNKNOWN:  # too short for the prefix index, which made-up models would fill
            model, prompt = f"made-up-{self._rng.randrange(MADE_UP)}", "p"
        fields = {
            "model": model,
            "prompt": prompt,
            "user": kind,
            "stream": kind is not Scenario.WHOLE,
        }
        body = b"{" if kind is Scenario.REFUSED else msgspec.json.encode(fields)
        headers = [(b"x-session-id", b"%d" % name)]
        exchange = await self._pool.acquire()
        reply = _Reply(exchange, leaves=kind is Scenario.LEAVES_WITHIN)
        exchange.send(UpstreamRequest(b"POST", b"/v1/completions", headers, body), reply)
        if kind is Scenario.LEAVES_AT_ONCE:
            await asyncio.sleep(self._rng.random() / 100)
            exchange.abort()
        else:
            await reply.done

    async def _get(self, path: bytes) -> bytes:
        """Raises UpstreamError when there is no response."""
        exchange = await self._pool.acquire()
        reply = _Reply(exchange, leaves=False)
        exchange.send(UpstreamRequest(b"GET", path, [], b""), reply)
        await reply.done
        if not reply.body:
            raise UpstreamError(f"no answer to {path.decode()}")
        return bytes(reply.body)
