"""The connection to the client of one request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from penstock.gateway.relay.write_batch import WriteBatch
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.upstream.exchange import Exchange, Headers
from penstock.http.sink import ReplySink
from penstock.http.write_target import WriteTarget

if TYPE_CHECKING:
    from penstock.gateway.relay.attempt import Attempt

REQUEST_ID = b"x-request-id"


class EndpointConnections(Protocol):
    """EndpointConnections to one endpoint."""

    def acquire_exchange(self, *, fresh: bool = False) -> Exchange | None: ...

    async def acquire(self, *, fresh: bool = False) -> Exchange: ...


class HttpClientConnection:
    """The connection that a request came on: the relay writes the reply to it, an attempt listens to it."""

    def __init__(self, sink: ReplySink, request_id: tuple[bytes, bytes], write_batch: WriteBatch) -> None:
        """``request_id``: a header that replies get unless they have one of that name."""
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the client has disconnected."""
        self.sink = sink
        self.streamed = False
        """The reply that has begun has no length."""
        self.reply_headers: Headers = []
        """Headers that the reply gets, in the place of others of these names."""
        self.connections: Callable[[Endpoint], EndpointConnections] | None = None
        """Gives connections to an endpoint for this client alone; None: it shares those of all."""
        self._request_id = request_id
        self._write_batch = write_batch
        self._attempt: Attempt | None = None
        self._paused = False
        sink.listen(self)

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
        if self.reply_headers:
            ours = {name for name, _ in self.reply_headers}
            headers = [*(header for header in headers if header[0] not in ours), *self.reply_headers]
        names = {name for name, _ in headers}
        if REQUEST_ID not in names:
            headers = [*headers, self._request_id]
        self.streamed = status not in (204, 304) and b"content-length" not in names
        self.sink.begin(status, headers)

    @property
    def write_target(self) -> WriteTarget | None:
        """How events may be written now without :meth:`write`; None: not at all."""
        if not self.streamed or self._paused or self._write_batch.holds(self):
            return None
        return self.sink.write_target

    def write(self, data: bytes) -> None:
        """Write bytes of the body, at the end of this iteration of the event loop."""
        self._write_batch.write(self, data)

    def end(self) -> None:
        self._write_batch.flush_client(self)
        self.sink.finish()

    def cut(self) -> None:
        """Break the connection, so that the client cannot take the body for a complete one."""
        self._write_batch.flush_client(self)
        self.sink.cut()

    # -- called by the connection

    def on_disconnect(self) -> None:
        self._write_batch.forget(self)
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
