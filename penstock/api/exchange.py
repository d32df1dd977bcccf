"""One HTTP request and what became of its reply."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from penstock.generation.dialect import Dialect
from penstock.generation.replies import RequestReply
from penstock.http.sink import REPLY_HEADERS, Message, Scope, Send
from penstock.streaming.stream import StreamError

EXCHANGE = "penstock.exchange"
"""Key in the ASGI scope under which the application keeps a request's Exchange."""
CLIENT_GONE = 499
"""Status of a request whose client left before its reply; nginx's number for it."""


class Exchange:
    """A request from its arrival to the end of its reply. Its ``send`` stands in for the server's."""

    __slots__ = (
        "_on_end",
        "_send",
        "_status",
        "arrival",
        "detached",
        "dialect",
        "headers",
        "method",
        "path",
        "reply",
        "request_id",
    )

    def __init__(
        self,
        scope: Scope,
        send: Send,
        request_id: str,
        headers: Sequence[tuple[bytes, bytes]],
        on_end: Callable[[Exchange, StreamError | None], None],
    ) -> None:
        """``headers`` are added to the reply, whoever sends it. ``on_end`` is called at the
        end of a detached reply, with an error if nothing was sent. Leaves itself in the scope."""
        self._send = send
        self._on_end = on_end
        self._status = 0
        self.detached = False
        """The application's call returns before the reply has ended; the sink writes the rest."""
        self.dialect: Dialect | None = None
        """The API that is asked, on the routes that generate."""
        self.arrival = time.monotonic()
        self.method: str = scope["method"]
        self.path: bytes = scope.get("raw_path") or scope["path"].encode()
        """As it was sent: percent-encoded, without the query."""
        self.request_id = request_id
        self.headers = headers
        self.reply: RequestReply | None = None
        """Set by the endpoints that generate, once they have one."""
        scope[EXCHANGE] = self
        scope[REPLY_HEADERS] = headers

    def on_end(self, error: StreamError | None) -> None:
        """A detached reply has ended; ``error`` is still to be sent."""
        self._on_end(self, error)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            message["headers"] = [*message["headers"], *self.headers]
        await self._send(message)

    @property
    def status(self) -> int:
        """Of the reply, once it has ended. A stream's headers may have been sent by its sink."""
        if not self._status:
            return 200 if self.reply is not None and self.reply.started else CLIENT_GONE
        return self._status
