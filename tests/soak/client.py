"""Clients of a soak over HTTP/1.1: they keep, drop, read slowly or do not read connections."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from typing import cast
from urllib.parse import urlsplit

from tests.soak.exchange import SLOW_READ_INTERVAL_S, SMALL_WINDOW, Exchange, SentRequest
from tests.soak.request_mix import ClientBehaviour, RequestSpec

REUSE = 0.7
"""Share of requests that reuse an open connection, where there is one."""


class _Connection(asyncio.Protocol, Exchange):
    """One connection to the server, with one request at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.port = 0
        self.opened_at = 0.0
        self.used = False
        self._transport: asyncio.Transport
        self._attempt: SentRequest | None = None
        self._sip: asyncio.TimerHandle | None = None
        self._slow = False

    # -- asyncio calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.port = transport.get_extra_info("sockname")[1]
        self.open = True

    def data_received(self, data: bytes) -> None:
        if self._attempt is not None:
            self._attempt.seen.feed(data)
            self.changed.set()
        if self._slow and not self._transport.is_closing():
            self._transport.pause_reading()
            loop = asyncio.get_running_loop()
            self._sip = loop.call_later(SLOW_READ_INTERVAL_S, self._transport.resume_reading)

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        if self._sip is not None:
            self._sip.cancel()
        self.changed.set()

    # -- a request

    async def run(self, request: bytes, spec: RequestSpec, seconds: float) -> SentRequest:
        """Sends it and behaves as ``spec`` says until the request, the connection or the time limit ends."""
        attempt = self._attempt = SentRequest(self.port, self.opened_at, reused=self.used)
        self.used = True
        self._slow = spec.behaviour is ClientBehaviour.SLOW
        self._transport.write(request)
        await self.until_end(attempt, spec, seconds)
        self._attempt = None
        self._slow = False
        return attempt

    def stop_reading(self) -> None:
        self._transport.pause_reading()

    def read_again(self) -> None:
        self._transport.resume_reading()

    def close(self) -> None:
        self._transport.abort()


class ClientPool:
    """Sends requests to one server and keeps connections."""

    def __init__(self, url: str, rng: random.Random) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._random = rng
        self._idle: list[_Connection] = []

    async def send(self, spec: RequestSpec, seconds: float) -> SentRequest:
        """Sends a request and waits at most ``seconds`` for its end. Raises OSError when no connection can be
        opened, TimeoutError when none opens in time."""
        narrow = spec.behaviour in (ClientBehaviour.SLOW, ClientBehaviour.STALL)
        connection = None if narrow else self._kept()
        if connection is None:
            async with asyncio.timeout(seconds):
                connection = await self._connect(SMALL_WINDOW if narrow else None)
        attempt = await connection.run(self._request(spec), spec, seconds)
        if connection.open and attempt.seen.reusable and not narrow:
            self._idle.append(connection)
        else:
            connection.close()
        return attempt

    def close(self) -> None:
        """Closes idle connections."""
        while self._idle:
            self._idle.pop().close()

    def _kept(self) -> _Connection | None:
        self._idle = [connection for connection in self._idle if connection.open]
        if not self._idle or self._random.random() > REUSE:
            return None
        return self._idle.pop(self._random.randrange(len(self._idle)))

    async def _connect(self, window: int | None) -> _Connection:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        opened_at = time.monotonic()
        plain = socket.socket(family)
        try:
            plain.setblocking(False)
            if window is not None:
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(plain, (self._host, self._port))
            _, connection = await loop.create_connection(_Connection, sock=plain)
        except BaseException:
            plain.close()
            raise
        connection.opened_at = opened_at
        return connection

    def _request(self, spec: RequestSpec) -> bytes:
        body = spec.body
        head = (
            f"POST {spec.path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body
