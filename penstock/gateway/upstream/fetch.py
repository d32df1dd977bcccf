"""One short reply of a model server, read whole: what the gateway asks for itself."""

from __future__ import annotations

import asyncio

from penstock.gateway.upstream.connection_pool import ConnectionPool
from penstock.gateway.upstream.exchange import Exchange, Failure, Headers, UpstreamError, UpstreamRequest


class TooLargeError(UpstreamError):
    """The reply is larger than its reader takes."""


class BrokenReplyError(UpstreamError):
    """The server may have begun the request, and gave no whole reply."""


async def fetch(connections: ConnectionPool, request: UpstreamRequest, most_bytes: int) -> tuple[int, bytes]:
    """Status and body of the reply. Raises UpstreamError, BrokenReplyError, and
    TooLargeError beyond ``most_bytes``."""
    exchange = await connections.acquire()
    reply = _WholeReply(exchange, most_bytes)
    exchange.send(request, reply)
    try:
        return await reply.done
    except asyncio.CancelledError:
        exchange.abort()
        raise


class _WholeReply:
    def __init__(self, exchange: Exchange, most_bytes: int) -> None:
        self.done: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._exchange = exchange
        self._most_bytes = most_bytes
        self._status = 0
        self._body = bytearray()

    def on_head(self, status: int, headers: Headers) -> None:
        self._status = status

    def on_body(self, data: bytes, now: float) -> None:
        self._body += data
        if len(self._body) > self._most_bytes and not self.done.done():
            self._exchange.abort()
            self.done.set_exception(TooLargeError(f"its reply is larger than {self._most_bytes} bytes"))

    def on_end(self) -> None:
        if not self.done.done():
            self.done.set_result((self._status, bytes(self._body)))

    def on_broken(self, reason: str, failure: Failure) -> None:
        if not self.done.done():
            unprocessed = failure is Failure.UNPROCESSED
            self.done.set_exception((UpstreamError if unprocessed else BrokenReplyError)(reason))
