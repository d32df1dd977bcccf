"""One request of the API server: the HTTP request, and what the application adds to it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from penstock.generation.dialect import DescribingRoute, Dialect, TokenCounter
from penstock.generation.media.preparation import Pictures
from penstock.generation.pooling.dialect import PoolingDialect
from penstock.generation.pooling.reply import PooledReply
from penstock.generation.replies.reply import RequestReply
from penstock.http.errors import ApiError
from penstock.http.request import HttpRequest
from penstock.streaming.stream import StreamError
from penstock.telemetry.trace_context import TraceContext

SESSION = "session"
"""What requests of a WebSocket have derived from their head, which is the connection's: see
:attr:`penstock.generation.dialect.RequestInfo.session`."""
CLIENT_GONE = 499
"""Status, as in nginx, of a request whose client disconnected before its reply."""


class ApiRequest:
    """A request from its arrival to the end of its reply."""

    __slots__ = (
        "_on_end",
        "arrival",
        "detached",
        "dialect",
        "error",
        "error_shape",
        "http",
        "logprob_bytes",
        "pictures",
        "reply",
        "request_id",
        "tenant",
        "trace",
    )

    def __init__(
        self,
        http: HttpRequest,
        *,
        request_id: str,
        on_end: Callable[[ApiRequest, StreamError | None], None],
    ) -> None:
        """``on_end`` is called at the end of a detached reply, with an error if nothing was sent."""
        self.http = http
        self._on_end = on_end
        self.detached = False
        """Whether the application returns before the reply has ended; the reply then writes to the sink."""
        self.dialect: Dialect | PoolingDialect | None = None
        """The API of a route that engines answer."""
        self.error_shape: Dialect | PoolingDialect | DescribingRoute | TokenCounter | None = None
        """The API whose shape errors have; None: OpenAI's."""
        self.arrival = time.monotonic()
        self.request_id = request_id
        self.tenant: str | None = None
        """Whose API key the request has, if the server has several; see :meth:`Keys.check`."""
        self.logprob_bytes = 0
        """Reserved for logprobs until the end of the reply, if they are very many per token."""
        self.pictures: Sequence[Pictures] = ()
        """What its prompts show, until the end of the reply."""
        self.trace: TraceContext | None = None
        """Set on generating routes if spans are made."""
        self.error: ApiError | None = None
        """What it was answered with, if it failed."""
        self.reply: RequestReply | PooledReply | None = None
        """Set by routes that engines answer once the reply exists."""

    @property
    def client(self) -> str:
        """Who sends the request, as far as can be told: the tenant, or else the address."""
        return self.http.address if self.tenant is None else self.tenant

    def on_end(self, error: StreamError | None) -> None:
        """A detached reply has ended; ``error`` is still to be sent."""
        self._on_end(self, error)

    def add_headers(self, *headers: tuple[bytes, bytes]) -> None:
        """Add headers to the reply."""
        self.http.reply_headers = (*self.http.reply_headers, *headers)

    async def reply_error(self, error: ApiError) -> None:
        """Send an error reply, in the shape of the API that is asked."""
        # Its traceback refers to this object: both, with the body and what was made of it, would stay until a
        # full garbage collection.
        self.error = error.with_traceback(None)
        shape = self.error_shape
        body = None if shape is None else shape.error_body(error, self.request_id)
        await self.http.reply_error(error, body)

    @property
    def status(self) -> int:
        """Status of a reply that has ended."""
        return self.http.status or CLIENT_GONE


Handler: TypeAlias = Callable[[ApiRequest], Awaitable[None]]
"""Answers the requests of one route."""
