"""Clients of a soak over HTTP/2: many requests share a connection, each with its own way of reading."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import urlsplit

from penstock.http.http2.frames import DEFAULT_WINDOW
from tests.http2_client import Http2Client
from tests.soak.exchange import SLOW_READ_INTERVAL_S, SMALL_WINDOW, Exchange, SentRequest
from tests.soak.request_mix import ClientBehaviour, RequestSpec

MAX_STREAMS = 16
"""Of a connection."""
REUSE = 0.95
"""Share of requests that go over an open connection, where one has a stream left."""
WINDOWS = (SMALL_WINDOW, DEFAULT_WINDOW, 1 << 20)
"""Of the streams of a connection."""


class ClientConnection(asyncio.Protocol):
    """One connection to the server."""

    def __init__(self, authority: str, window: int) -> None:
        self.http2 = Http2Client(authority, window)
        self.port = 0
        self.opened_at = 0.0
        self.open = False
        self._transport: asyncio.Transport
        self._changed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.port = transport.get_extra_info("sockname")[1]
        self.open = True

    def data_received(self, data: bytes) -> None:
        self.http2.feed(data)
        self.flush()
        self._changed.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        self.http2.lost("the connection is closed" if error is None else repr(error))
        self._changed.set()

    def flush(self) -> None:
        output = self.http2.take_output()
        if output and self.open:
            self._transport.write(output)

    def close(self) -> None:
        self._transport.abort()

    def stop_reading(self) -> None:
        self._transport.pause_reading()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for it or the end of the connection."""
        self.flush()
        while self.open and not condition():
            self._changed.clear()
            await self._changed.wait()

    @property
    def idle(self) -> bool:
        return not self.http2.running

    @property
    def takes_more(self) -> bool:
        return self.open and self.http2.usable and self.http2.running < MAX_STREAMS


class _Stream(Exchange):
    """One request on a connection, and the receiver of its reply."""

    def __init__(self, connection: ClientConnection, spec: RequestSpec, attempt: SentRequest) -> None:
        super().__init__()
        self.open = True
        self._connection = connection
        self._spec = spec
        self._attempt = attempt
        self._id = connection.http2.start(spec.path, spec.body, self)
        self._sip: asyncio.TimerHandle | None = None

    async def run(self, seconds: float) -> None:
        connection, attempt = self._connection, self._attempt
        connection.flush()
        if self._spec.behaviour is ClientBehaviour.SLOW:
            self.stop_reading()
            self._read_slowly()
        await self.until_end(attempt, self._spec, seconds)
        if self._sip is not None:
            self._sip.cancel()
        connection.http2.reset(self._id)
        connection.flush()

    def stop_reading(self) -> None:
        self._connection.http2.hold(self._id)

    def read_again(self) -> None:
        self._connection.http2.open(self._id)
        self._connection.flush()

    def _read_slowly(self) -> None:
        if self.open:
            self.read_again()
            self.stop_reading()
            self._sip = asyncio.get_running_loop().call_later(SLOW_READ_INTERVAL_S, self._read_slowly)

    # -- the connection calls these

    def begin(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        self._attempt.seen.begin(status, headers)
        self.changed.set()

    def on_body(self, data: bytes) -> None:
        self._attempt.seen.on_body(data)
        self.changed.set()

    def end(self) -> None:
        self._attempt.seen.end()
        self.open = False
        self.changed.set()

    def cut(self, reason: str, *, refused: bool) -> None:
        self._attempt.seen.cut(reason, refused=refused)
        self.open = False
        self.changed.set()


class Http2ClientPool:
    """As :class:`tests.soak.client.ClientPool`."""

    def __init__(self, url: str, rng: random.Random) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._random = rng
        self._connections: list[ClientConnection] = []

    async def send(self, spec: RequestSpec, seconds: float) -> SentRequest:
        connection = self._kept()
        if connection is None:
            async with asyncio.timeout(seconds):
                connection = await self._connect()
        attempt = SentRequest(connection.port, connection.opened_at, reused=False)
        await _Stream(connection, spec, attempt).run(seconds)
        if connection.idle and not connection.takes_more:
            connection.close()
        return attempt

    def close(self) -> None:
        """Closes all connections; none has a request."""
        while self._connections:
            self._connections.pop().close()

    def _kept(self) -> ClientConnection | None:
        self._connections = [each for each in self._connections if each.open]
        found = [each for each in self._connections if each.takes_more]
        return self._random.choice(found) if found and self._random.random() < REUSE else None

    async def _connect(self) -> ClientConnection:
        opened_at = time.monotonic()
        window = self._random.choice(WINDOWS)
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: ClientConnection(f"{self._host}:{self._port}", window), self._host, self._port
        )
        connection.opened_at = opened_at
        self._connections.append(connection)
        return connection
