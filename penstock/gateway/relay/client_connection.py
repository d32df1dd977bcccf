"""The connections that requests come on, as the relay sees them."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Protocol

from penstock.gateway.relay.attempt import Attempt
from penstock.gateway.upstream.http_client import Headers
from penstock.http.http1 import ServerProtocol

REQUEST_ID = b"x-request-id"


class BodyWriter(Protocol):
    """Where a part of a reply's body is written to."""

    def write_body(self, data: bytes) -> None: ...


class WriteBatch:
    """What one turn of the event loop has for clients, to be written at its end.

    A turn reads from many model servers. Written one right after the other, what they sent costs less than
    written after each read: a process that gets several pieces is woken once, and reading and writing do not
    drive each other out of the CPU's caches. It delays a piece by the time that the turn takes.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[BodyWriter, bytes]] = []

    def write(self, body: BodyWriter, data: bytes) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting.append((body, data))

    def flush(self) -> None:
        """Write now what waits; before anything else is done to one of the connections."""
        waiting, self._waiting = self._waiting, []
        for body, data in waiting:
            body.write_body(data)

    def forget(self, body: BodyWriter) -> None:
        """Nobody reads it any more."""
        self._waiting = [entry for entry in self._waiting if entry[0] is not body]


class HttpClientConnection:
    """The client's connection, as :class:`penstock.gateway.relay.relay.ClientConnection` wants it."""

    def __init__(self, protocol: ServerProtocol, request_id: tuple[bytes, bytes], outbox: WriteBatch) -> None:
        """``request_id``: a header for replies that have none of that name."""
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._protocol = protocol
        self._request_id = request_id
        self._write_batch = outbox
        self.write = partial(outbox.write, protocol)
        self._attempt: Attempt | None = None
        self._paused = False
        protocol.listen(self)

    # -- of the relay

    def listen(self, attempt: Attempt | None) -> None:
        self._attempt = attempt
        if attempt is None:
            return
        if self.gone.done():
            attempt.on_disconnect()
        elif self._paused:
            attempt.on_pause()

    def start(self, status: int, headers: Headers) -> None:
        if not any(name == REQUEST_ID for name, _ in headers):
            headers = [*headers, self._request_id]
        self._protocol.begin(status, headers)

    def end(self) -> None:
        self._write_batch.flush()
        self._protocol.finish()

    def cut(self) -> None:
        self._write_batch.flush()
        self._protocol.cut()

    # -- of the connection

    def on_disconnect(self) -> None:
        self._write_batch.forget(self._protocol)
        if not self.gone.done():
            self.gone.set_result(None)
        if self._attempt is not None:
            self._attempt.on_disconnect()

    def on_pause(self) -> None:
        self._paused = True
        if self._attempt is not None:
            self._attempt.on_pause()

    def on_resume(self) -> None:
        self._paused = False
        if self._attempt is not None:
            self._attempt.on_resume()
