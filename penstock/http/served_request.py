"""A request that is being answered: its state, and what the application receives and sends (ASGI)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from penstock.http.errors import ApiError
from penstock.http.sink import Message, Scope


class RequestConnection(Protocol):
    """The connection of a request, or its stream of a connection, for what the application sends by ASGI."""

    @property
    def write_paused(self) -> bool:
        """Whether the client reads too slowly to be sent more."""
        ...

    def on_body_wanted(self) -> None:
        """The application waits for more of the body."""
        ...

    def reply_head(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
        """The encoded head of a reply, which has then begun."""
        ...

    def write_part(self, head: bytes, body: bytes, *, last: bool) -> None:
        """Write ``head``, of :meth:`reply_head`, and a part of the body; both may be empty. ``last`` ends the
        reply."""
        ...


class ServedRequest:
    """One request of a connection, from its head to the end of its reply."""

    __slots__ = (
        "_body",
        "_connection",
        "_delivered",
        "_fault",
        "_head",
        "_waiter",
        "body_complete",
        "body_size",
        "complete",
        "disconnected",
        "events",
        "expects_continue",
        "keep_alive",
        "scope",
        "started",
        "streamed",
    )

    def __init__(
        self, scope: Scope, connection: RequestConnection, *, keep_alive: bool, expects_continue: bool
    ) -> None:
        self.scope = scope
        self._connection = connection
        self._waiter: asyncio.Future[None] | None = None
        self._head = b""
        """Head of a reply whose body has not begun."""
        # the request
        self._body: bytes | bytearray = b""
        """What has come of the body and the application has not received."""
        self._delivered = False
        """Whether the application has received the end of the body."""
        self.body_size = 0
        """Bytes of the body that are held for the application, with those that it has received."""
        self.body_complete = False
        self.expects_continue = expects_continue
        """Whether the client still waits for 100 (Continue)."""
        self.disconnected = False
        """The client is gone."""
        self._fault: ApiError | None = None
        """Why the rest of the body does not come."""
        # the reply
        self.keep_alive = keep_alive
        """Whether the connection serves another request after the reply."""
        self.started = self.complete = False
        self.events = False
        """Whether the reply's body is a stream of events of the server's own."""
        self.streamed = False
        """Whether the reply goes on without a known length: it may be silent, and limits its own backlog."""

    # -- called by the connection

    @property
    def unreceived(self) -> int:
        """Bytes of the body that the application has not received."""
        return len(self._body)

    def add_body(self, data: bytes) -> None:
        self.body_size += len(data)
        if not self._body:
            self._body = data
        else:
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += data

    def fail(self, error: ApiError) -> None:
        """The rest of the body does not come: the application, which waits for it, is to answer ``error``."""
        self._fault = error
        self._body, self.body_size = b"", 0
        self.wake()

    def wake(self) -> None:
        """Let the application, which waits, look again."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # -- called by the application

    async def receive(self) -> Message:
        """A part of the body, the last one with ``more_body`` False; after it, and at any time when the
        client has gone, ``http.disconnect``. Raises ApiError if the rest of the body does not come."""
        while not (self.disconnected or self.complete):
            if self._fault is not None:
                raise self._fault
            if self._body or (self.body_complete and not self._delivered):
                body, self._body = self._body, b""
                self._delivered = self.body_complete
                return {"type": "http.request", "body": bytes(body), "more_body": not self.body_complete}
            if not self.body_complete:
                self._connection.on_body_wanted()
            await self._wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Ignored when the client has gone."""
        while self._connection.write_paused and not self.disconnected:
            await self._wait()
        if self.disconnected:
            return
        if message["type"] == "http.response.start":
            self._head = self._connection.reply_head(message["status"], message["headers"])
            self.streamed = False  # its parts wait until the client reads
            return
        head, self._head = self._head, b""
        last = not message.get("more_body", False)
        self._connection.write_part(head, message.get("body", b""), last=last)

    async def _wait(self) -> None:
        if self._waiter is None or self._waiter.done():  # done: who waited was cancelled
            self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter
