"""One response over a WebSocket to a model server, as the relay sees requests: a stream of events."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from penstock.gateway.upstream.exchange import Failure, ReplyReceiver, UpstreamRequest
from penstock.gateway.upstream.reply_scanner import PlainEventRelay, PlainEventShape
from penstock.gateway.websocket.create_message import CANCEL_MESSAGE, CreateMessage
from penstock.gateway.websocket.server_message import ENDS, ERROR, as_event, refusal_in, type_of

if TYPE_CHECKING:
    from penstock.gateway.websocket.socket_sink import SocketSink
    from penstock.gateway.websocket.upstream_socket import UpstreamSocket

TOO_LARGE = "request_too_large"
_STREAM = [(b"content-type", b"text/event-stream")]


class SocketExchange:
    """See :class:`~penstock.gateway.upstream.exchange.Exchange`."""

    def __init__(self, carrier: UpstreamSocket, create: CreateMessage, wish: SocketSink) -> None:
        self._carrier = carrier
        self._create = create
        self._wish = wish
        self._receiver: ReplyReceiver | None = None
        """None: nobody wants the rest."""
        self._begun = False
        self._loop = asyncio.get_running_loop()

    def send(self, request: UpstreamRequest, receiver: ReplyReceiver) -> None:
        self._receiver = receiver
        if not self._carrier.start(self, self._create.sent_as(request.body)):
            self._loop.call_soon(self.on_lost, "the WebSocket was closed", Failure.UNPROCESSED)
        elif self._wish.cancelled:
            self._carrier.tell(CANCEL_MESSAGE)

    async def send_part(self, data: bytes) -> None:
        """A message is sent whole."""

    def abort(self) -> None:
        self._receiver = None
        self._carrier.drop(self)

    def pause(self, receiver: ReplyReceiver) -> None:
        if self._receiver is receiver:
            self._carrier.pause(self)

    def resume(self, receiver: ReplyReceiver) -> None:
        if self._receiver is receiver:
            self._carrier.resume(self)

    def enter_fast_path(self, shape: PlainEventShape, relay: PlainEventRelay, size: int) -> int:
        return 0

    def leave_fast_path(self, relayed: int) -> None: ...

    # -- called by the WebSocket

    def on_message(self, data: bytes) -> None:
        kind = type_of(data)
        if kind in ENDS:
            self._carrier.ended(self)
        if (receiver := self._receiver) is None:
            return
        if not self._begun:
            self._begun = True
            refusal = refusal_in(data) if kind == ERROR else None
            receiver.on_head(*(refusal or (200, _STREAM)))
            if refusal is not None and self._receiver is not None:
                receiver.on_body(data, self._loop.time())
            elif self._receiver is not None:
                receiver.on_body(as_event(data), self._loop.time())
        else:
            receiver.on_body(as_event(data), self._loop.time())
        if kind in ENDS and self._receiver is not None:
            self._receiver = None
            receiver.on_end()

    def on_too_large(self, reason: str) -> None:
        """The server takes no message of this size: 413, as over HTTP."""
        if not self._begun:
            error = {"message": reason, "type": "RequestTooLargeError", "param": None, "code": TOO_LARGE}
            self.on_message(msgspec.json.encode({"type": "error", "status": 413, "error": error}))

    def on_lost(self, reason: str, failure: Failure) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.on_broken(reason, Failure.NETWORK if self._begun else failure)
