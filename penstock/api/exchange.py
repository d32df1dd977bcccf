"""One HTTP request of the application: its ASGI arguments, its connection, and the state of its reply."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from penstock.dialects.messages.errors import error_body as messages_error
from penstock.dialects.messages.errors import is_anthropic
from penstock.generation.dialect import Dialect
from penstock.generation.replies.reply import RequestReply
from penstock.http.asgi import first_headers
from penstock.http.errors import ApiError
from penstock.http.sink import Listener, Message, Receive, Scope, Send, Sink
from penstock.streaming.stream import StreamError
from penstock.telemetry.trace_context import TraceContext

CLIENT_GONE = 499
"""Status, as in nginx, of a request whose client disconnected before its reply."""


class Exchange:
    """A request from its arrival to the end of its reply. Routes send by its ``send``."""

    __slots__ = (
        "_on_end",
        "_send",
        "_status",
        "arrival",
        "detached",
        "dialect",
        "error",
        "headers",
        "logprob_bytes",
        "receive",
        "reply",
        "request_id",
        "scope",
        "sink",
        "tenant",
        "trace",
    )

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        sink: Sink,
        *,
        request_id: str,
        headers: Sequence[tuple[bytes, bytes]],
        on_end: Callable[[Exchange, StreamError | None], None],
    ) -> None:
        """``headers`` are added to every reply. ``on_end`` is called at the end of a detached reply, with an
        error if nothing was sent."""
        self.scope = scope
        self.receive = receive
        self.sink = sink
        """The client's connection, for streamed replies."""
        self._send = send
        self._on_end = on_end
        self._status = 0
        self.detached = False
        """Whether the application returns before the reply has ended; the reply then writes to ``sink``."""
        self.dialect: Dialect | None = None
        """The API of a generating route."""
        self.arrival = time.monotonic()
        self.request_id = request_id
        self.headers = headers
        self.tenant: str | None = None
        """Whose API key the request has, if the server has several; see :meth:`Keys.check`."""
        self.logprob_bytes = 0
        """Reserved for logprobs until the end of the reply, if they are very many per token."""
        self.trace: TraceContext | None = None
        """Set on generating routes if spans are made."""
        self.error: ApiError | None = None
        """What it was answered with, if it failed."""
        self.reply: RequestReply | None = None
        """Set by generating routes once the reply exists."""

    @property
    def method(self) -> str:
        method: str = self.scope["method"]
        return method

    @property
    def path(self) -> bytes:
        """Percent-encoded, without the query."""
        path: bytes = self.scope.get("raw_path") or self.scope["path"].encode()
        return path

    @property
    def client(self) -> str:
        """Who sends the request, as far as can be told: the tenant, or else the address."""
        if self.tenant is not None:
            return self.tenant
        address = self.scope["client"]
        return address[0] if address else ""

    def on_end(self, error: StreamError | None) -> None:
        """A detached reply has ended; ``error`` is still to be sent."""
        self._on_end(self, error)

    def error_body(self, error: ApiError) -> bytes:
        """The body of an error reply, in the shape of the API that is asked."""
        if self.dialect is not None:
            return self.dialect.error_body(error, self.request_id)
        return messages_error(error, self.request_id) if self.for_anthropic else error.body()

    @property
    def for_anthropic(self) -> bool:
        """Whether the request is for Anthropic's API, or from a client of it."""
        return is_anthropic(self.scope["path"], first_headers(self.scope))

    def add_warning(self, text: str) -> None:
        """Add a ``Warning`` header (RFC 7234, 5.5; 299: a lasting condition) to the reply."""
        self.headers = (*self.headers, (b"warning", b'299 penstock "%b"' % text.encode()))

    def listen(self, listener: Listener) -> None:
        """Reply with a stream of events, which the route writes to ``sink`` itself."""
        self._status = 200
        self.sink.listen(listener, self.headers)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            message["headers"] = [*message["headers"], *self.headers]
        await self._send(message)

    @property
    def status(self) -> int:
        """Status of a reply that has ended. The headers of a stream do not pass through ``send``."""
        if not self._status:
            return 200 if self.reply is not None and self.reply.started else CLIENT_GONE
        return self._status


Handler: TypeAlias = Callable[[Exchange], Awaitable[None]]
"""Answers the requests of one route."""
