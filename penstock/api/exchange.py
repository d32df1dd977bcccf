"""One HTTP request and what became of its reply."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from penstock.generation.replies import RequestReply
from penstock.generation.streamed import StreamedReply
from penstock.http.sink import REPLY_HEADERS, Message, Scope, Send
from penstock.streaming.stream import StreamError

EXCHANGE = "penstock.exchange"
"""Key in the ASGI scope under which the application keeps a request's Exchange."""
CLIENT_GONE = 499
"""Status of a request whose client left before its reply; nginx's number for it."""


class Exchange:
    """A request from its arrival to the end of its reply. Its ``send`` stands in for the server's."""

    __slots__ = (
        "_on_over",
        "_send",
        "_status",
        "arrival",
        "goes_on",
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
        on_over: Callable[[Exchange, StreamError | None], None],
    ) -> None:
        """``headers`` are added to the reply, whoever sends it; for ``on_over`` see :meth:`over`. Leaves
        itself in the scope."""
        self._send = send
        self._on_over = on_over
        self._status = 0
        self.goes_on = False
        """The application's call returns before the reply has ended: its sink writes it."""
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

    def over(self, error: StreamError | None) -> None:
        """A reply that went on has ended; with an error that is yet to be told, if nothing was sent."""
        self._on_over(self, error)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            message["headers"] = [*message["headers"], *self.headers]
        await self._send(message)

    @property
    def status(self) -> int:
        """Of the reply, once it has ended. A stream's headers may have been sent by its sink."""
        if not self._status:
            streamed = isinstance(self.reply, StreamedReply) and self.reply.started
            return 200 if streamed else CLIENT_GONE
        return self._status
