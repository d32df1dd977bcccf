"""The connection to the client of one request, and the batch of writes to all clients."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from penstock.gateway.upstream.http_client import Headers
from penstock.http.sink import Sink

if TYPE_CHECKING:
    from penstock.gateway.relay.attempt import Attempt

REQUEST_ID = b"x-request-id"


class WriteBatch:
    """Collects writes to clients during one iteration of the event loop and makes them at its end.

    An iteration reads from many model servers. Batched writes cost less than a write after each read: a
    receiving process wakes up once for several pieces, and reads and writes do not evict each other from the
    CPU's caches. A piece is delayed by at most one iteration.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Sink, bytes]] = []

    def write(self, connection: Sink, data: bytes) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting.append((connection, data))

    def flush(self) -> None:
        """Make the collected writes now; called before any other operation on one of the connections."""
        waiting, self._waiting = self._waiting, []
        for connection, data in waiting:
            connection.write_body(data)

    def forget(self, connection: Sink) -> None:
        """Drop the writes to a connection whose client has disconnected."""
        self._waiting = [entry for entry in self._waiting if entry[0] is not connection]


class HttpClientConnection:
    """The connection that a request came on: the relay writes the reply to it, an attempt listens to it."""

    def __init__(self, protocol: Sink, request_id: tuple[bytes, bytes], write_batch: WriteBatch) -> None:
        """``request_id``: a header that replies get unless they have one of that name."""
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the client has disconnected."""
        self._protocol = protocol
        self._request_id = request_id
        self._write_batch = write_batch
        self.write = partial(write_batch.write, protocol)
        """Writes bytes of the body, at the end of this iteration of the event loop."""
        self._attempt: Attempt | None = None
        self._paused = False
        protocol.listen(self)

    # -- called by the relay

    def listen(self, attempt: Attempt | None) -> None:
        """From here on ``attempt`` gets disconnects and write pauses; None: nothing does."""
        self._attempt = attempt
        if attempt is None:
            return
        if self.gone.done():
            attempt.on_disconnect()
        elif self._paused:
            attempt.on_pause()

    def start(self, status: int, headers: Headers) -> None:
        """Send the head of the reply; without a content-length among ``headers`` the body is chunked."""
        if status == 204:  # it has none (RFC 9110 §8.6), whatever the model server says
            headers = [header for header in headers if header[0] != b"content-length"]
        if not any(name == REQUEST_ID for name, _ in headers):
            headers = [*headers, self._request_id]
        self._protocol.begin(status, headers)

    def end(self) -> None:
        self._write_batch.flush()
        self._protocol.finish()

    def cut(self) -> None:
        """Break the connection, so that the client cannot take the body for a complete one."""
        self._write_batch.flush()
        self._protocol.cut()

    # -- called by the connection

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
