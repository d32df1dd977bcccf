"""One request of a connection, from its head to the end of its reply: all that an application gets.

Connections of HTTP/1.1 and HTTP/2 make it, and call the application with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from penstock.http.errors import MALFORMED, ApiError
from penstock.http.http1.request_head import RequestHead
from penstock.http.sink import Headers, Sink, StreamKind

JSON = b"application/json"
MAX_REQUEST_ID = 256
"""Characters of a request id, in the body or in the header X-Request-Id."""

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed its connection before its reply was complete; no reply is sent."""


class HttpRequest:
    """A request and the state of its reply.

    Large replies and streams are written to its :attr:`sink`, the connection, or its stream of a connection.
    """

    __slots__ = (
        "_body",
        "_delivered",
        "_fault",
        "_waiter",
        "body_complete",
        "body_size",
        "client",
        "complete",
        "derived",
        "disconnected",
        "events",
        "expects_continue",
        "fields",
        "headers",
        "keep_alive",
        "method",
        "path",
        "reply_headers",
        "sink",
        "started",
        "status",
        "streamed",
        "target",
        "version",
    )

    def __init__(self, head: RequestHead, sink: Sink, client: tuple[str, int] | None) -> None:
        """``client``: host and port; None for a Unix socket, and for a client that has gone already."""
        # the head
        self.method = head.method
        self.path = head.path
        """Without percent-encoding. An application may set it to the path of its route."""
        self.target = head.target
        """The path as the client sent it, and the query, if there is one."""
        self.version = head.version
        self.headers = head.headers
        """Names in lower case, in the order in which the client sent them."""
        self.fields: Mapping[bytes, bytes] = head.fields
        """The headers by name; of those with the same name the first one."""
        self.derived = head.derived
        """See :attr:`penstock.http.http1.request_head.RequestHead.derived`."""
        self.client = client
        # the body
        self._body: bytes | bytearray = b""
        """What has come of the body and the application has not read."""
        self._delivered = False
        """Whether the application has read the end of the body."""
        self._fault: ApiError | None = None
        """Why the rest of the body does not come."""
        self._waiter: asyncio.Future[None] | None = None
        self.body_size = 0
        """Bytes of the body that are held for the application, with those that it has read."""
        self.body_complete = False
        self.expects_continue = head.expects_continue
        """Whether the client still waits for 100 (Continue)."""
        self.disconnected = False
        """Whether the client is gone."""
        # the reply
        self.sink = sink
        self.reply_headers: Headers = ()
        """Headers that every reply of the application gets beside its own."""
        self.status = 0
        """Status of the reply; 0: none has begun."""
        self.keep_alive = head.keep_alive
        """Whether the connection serves another request after the reply."""
        self.started = self.complete = False
        self.events: StreamKind | None = None
        """What the reply's body is if it is a stream of events of the server's own."""
        self.streamed = False
        """Whether the reply goes on without a known length: it may be silent, and limits its own backlog."""

    # -- called by the connection

    @property
    def unread(self) -> int:
        """Bytes of the body that the application has not read."""
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

    async def _wait(self) -> None:
        if self._waiter is None or self._waiter.done():  # done: who waited was cancelled
            self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    # -- the head

    @property
    def address(self) -> str:
        """The client's address; empty if it is not known."""
        return self.client[0] if self.client else ""

    @property
    def raw_path(self) -> bytes:
        """The path, as the client sent it."""
        return self.target.partition(b"?")[0]

    @property
    def query(self) -> bytes:
        """Empty: there is none."""
        return self.target.partition(b"?")[2]

    def header(self, name: bytes) -> str | None:
        """The first header called ``name`` (lower case), decoded as Latin-1; None when absent."""
        value = self.fields.get(name)
        return None if value is None else value.decode("latin-1")

    def forget_headers(self) -> None:
        """Free the memory of the headers, which nobody asks for any more."""
        self.headers, self.fields, self.derived = [], {}, None

    def check_coding(self) -> None:
        """Check that the body is not compressed. Raises ApiError."""
        if b"content-encoding" not in self.fields:
            return
        for name, value in self.headers:
            if name == b"content-encoding" and value.lower() not in (b"", b"identity"):
                raise ApiError(
                    415,
                    "The header Content-Encoding is not identity: this server does not uncompress bodies.",
                    param="Content-Encoding",
                    headers=[(b"accept-encoding", b"identity")],
                )

    # -- the body

    def take_unread(self) -> bytes:
        """What has come of the body and was not read."""
        body, self._body, self.body_size = bytes(self._body), b"", 0
        return body

    async def read_part(self) -> bytes:
        """A part of the body that has not been read; empty at its end. Raises ClientGone, and ApiError if the
        rest of the body does not come."""
        while not (self.disconnected or self.complete):
            if self._fault is not None:
                raise self._fault
            if self._body or self.body_complete:
                body, self._body = self._body, b""
                self._delivered = self.body_complete
                return bytes(body)
            self.sink.on_body_wanted()
            await self._wait()
        raise ClientGone

    async def read_body(self, limit: int, too_large: Callable[[int], ApiError]) -> bytes:
        """The whole body. Raises ``too_large(limit)`` beyond ``limit`` bytes, ClientGone when it ends
        early."""
        if int(self.fields.get(b"content-length", 0)) > limit:
            raise too_large(limit)
        if self.body_complete and not (self._delivered or self._fault or self.disconnected or self.complete):
            body, self._body, self._delivered = self._body, b"", True
            if len(body) > limit:
                raise too_large(limit)
            return bytes(body)
        parts: list[bytes] = []
        size = 0
        while not self._delivered:
            parts.append(await self.read_part())
            size += len(parts[-1])
            if size > limit:
                raise too_large(limit)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def read_json(self, limit: int, too_large: Callable[[int], ApiError] | None = None) -> bytes:
        """The whole body of a JSON request. Raises ApiError for another content type, ``too_large(limit)``
        (by default: the route's own limit) beyond ``limit`` bytes, ClientGone if the client disconnects."""
        self.check_coding()
        kind = self.fields.get(b"content-type", JSON)
        if kind != JSON and not _is_json(kind):
            raise ApiError(
                400,
                f"Content-Type must be application/json, not {kind.decode('latin-1')!r}.",
                type=MALFORMED,
                param="Content-Type",
            )
        return await self.read_body(limit, too_large or _beyond_route)

    async def unless_gone(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of ``work``; to be called once the whole body has been read. Raises ClientGone, and
        cancels it, if the client disconnects meanwhile."""
        running, gone = asyncio.ensure_future(work), asyncio.ensure_future(self.gone())
        try:
            await asyncio.wait((running, gone), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise ClientGone
            return running.result()
        finally:
            running.cancel()
            gone.cancel()
            # An error refers to this frame. If the frame referred to the error, both would stay, with all
            # that the work has made, until a full garbage collection.
            del running

    async def gone(self) -> None:
        """Wait until the client is gone, or the reply complete."""
        while not (self.disconnected or self.complete):
            await self._wait()

    # -- the reply. What is sent to a client that has gone is ignored.

    async def reply(self, status: int, headers: Headers, body: bytes = b"") -> None:
        """Send a whole reply. ``headers`` have the length of its body, if it has one."""
        self.status = status
        if await self._is_readable():
            self.sink.reply(status, headers, body)

    async def reply_json(
        self, body: bytes, status: int = 200, headers: Headers = (), kind: bytes = JSON
    ) -> None:
        """Send a whole reply with a body; ``kind``: its content type."""
        length = b"%d" % len(body)
        await self.reply(status, [(b"content-type", kind), (b"content-length", length), *headers], body)

    async def reply_error(self, error: ApiError, body: bytes | None = None) -> None:
        """Send an error reply. ``body`` replaces OpenAI's shape of the error."""
        await self.reply_json(error.body() if body is None else body, error.status, error.headers)

    async def begin(self, status: int, headers: Headers) -> None:
        """Send the head of a reply whose length is not known; :meth:`write` and :meth:`finish` follow."""
        self.status = status
        if await self._is_readable():
            self.sink.begin(status, headers)
            self.streamed = False  # its parts wait until the client reads

    async def write(self, data: bytes) -> None:
        """Write a non-empty part of the reply's body, once the client has read those before."""
        if await self._is_readable():
            self.sink.write_body(data)

    async def finish(self) -> None:
        """End the reply's body."""
        if await self._is_readable():
            self.sink.finish()

    async def _is_readable(self) -> bool:
        """Wait until the client reads; False: it is gone."""
        while self.sink.write_paused and not self.disconnected:
            await self._wait()
        return not self.disconnected


Application = Callable[[HttpRequest], Coroutine[Any, Any, None]]
"""Called for each request. It runs without a task until it first waits (:mod:`penstock.http.eager`), and may
return before its reply ends if it has called :meth:`~penstock.http.sink.Sink.listen`."""


def first_values(headers: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Headers by name; of those with the same name the first one."""
    return dict(reversed(headers))


def _is_json(content_type: bytes) -> bool:
    kind = content_type.partition(b";")[0].strip().lower()
    return kind == JSON or kind.endswith(b"+json")


def beyond_option(limit: int) -> ApiError:
    """413 for a body of more than ``--max-request-bytes``."""
    return ApiError(413, f"The request body is larger than the {limit} bytes allowed by --max-request-bytes.")


def _beyond_route(limit: int) -> ApiError:
    return ApiError(413, f"The request body is larger than the {limit} bytes that this route takes.")
