"""One short reply of a model server: what the gateway asks for itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.gateway.upstream.connection_pool import ConnectionPool
from penstock.gateway.upstream.exchange import Exchange, Failure, Headers, UpstreamError, UpstreamRequest


class TooLargeError(UpstreamError):
    """The reply is larger than its reader takes."""

    def __init__(self, most_bytes: int, status: int) -> None:
        super().__init__(f"its reply is larger than {most_bytes} bytes")
        self.status = status


class BrokenReplyError(UpstreamError):
    """The server may have begun the request, and gave no whole reply."""


async def fetch(connections: ConnectionPool, request: UpstreamRequest, most_bytes: int) -> tuple[int, bytes]:
    """Status and body of the reply. Raises UpstreamError, BrokenReplyError, and
    TooLargeError beyond ``most_bytes``."""
    body = bytearray()
    status = await read_reply(await connections.acquire(), request, most_bytes, body.extend)
    return status, bytes(body)


async def read_reply(
    exchange: Exchange, request: UpstreamRequest, most_bytes: int, feed: Callable[[bytes], object]
) -> int:
    """The status of the reply; ``feed`` gets its body as it comes. Raises as :func:`fetch`."""
    reply = _Reply(exchange, most_bytes, feed)
    exchange.send(request, reply)
    try:
        return await reply.done
    except asyncio.CancelledError:
        exchange.abort()
        raise


class _Reply:
    def __init__(self, exchange: Exchange, most_bytes: int, feed: Callable[[bytes], object]) -> None:
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """The status."""
        self._exchange = exchange
        self._most_bytes = most_bytes
        self._feed = feed
        self._status = self._size = 0

    def on_head(self, status: int, headers: Headers) -> None:
        self._status = status

    def on_body(self, data: bytes, now: float) -> None:
        self._size += len(data)
        if self._size <= self._most_bytes:
            self._feed(data)
        elif not self.done.done():
            self._exchange.abort()
            self.done.set_exception(TooLargeError(self._most_bytes, self._status))

    def on_end(self) -> None:
        if not self.done.done():
            self.done.set_result(self._status)

    def on_broken(self, reason: str, failure: Failure) -> None:
        if not self.done.done():
            unprocessed = failure is Failure.UNPROCESSED
            self.done.set_exception((UpstreamError if unprocessed else BrokenReplyError)(reason))
