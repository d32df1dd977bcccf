"""Responses over WebSocket: ``GET /v1/responses`` with an upgrade.

Each ``response.create`` is a request of the application, as if its message were the body of POST
/v1/responses: one after the other, at most :data:`MAX_QUEUED` wait. The events of its reply are messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any

import msgspec

from penstock.api.api_request import SESSION, ApiRequest
from penstock.generation.replies.streamed import StreamedReply
from penstock.http.body_errors import malformed
from penstock.http.eager import run_eagerly
from penstock.http.errors import ApiError, shown
from penstock.http.http1.request_head import RequestHead
from penstock.http.request import Application, HttpRequest
from penstock.http.websocket.channel import Channel, ChannelUser
from penstock.http.websocket.codec import FAILED
from penstock.http.websocket.handshake import accepted, wants_websocket
from penstock.http.websocket.message_sink import MessageSink
from penstock.http.websocket.socket import WebSocket
from penstock.store.recent_responses import AllRecentResponses, RecentResponses

log = logging.getLogger(__name__)

MAX_QUEUED, MAX_QUEUED_BYTES = 16, 1 << 20
"""Messages that wait for the running response, and their bytes, from which on the connection is not read."""
MAX_STREAM_ID = 256
"""Characters of a stream_id, which each event of the response repeats."""
INLINE_BYTES = 256 * 1024
"""Largest message whose type is looked for on the event loop: 0.3 ms."""
CREATE, CANCEL = "response.create", "response.cancel"
_HANDSHAKE = frozenset(
    {b"connection", b"upgrade", b"x-request-id", b"content-length", b"content-type", b"transfer-encoding"}
)
"""Headers of the handshake, with those that begin with sec-websocket-, that are none of its requests'."""


class _Envelope(msgspec.Struct):
    """What the connection reads of a message."""

    type: Any = None
    stream_id: Any = None
    response_id: Any = None


_decode = msgspec.json.Decoder(_Envelope).decode


class ResponseSockets:
    """Those of one process."""

    def __init__(self, app: Application, max_message_bytes: int) -> None:
        self._app = app
        self._max_message_bytes = max_message_bytes
        self._recent = AllRecentResponses()

    async def open(self, request: ApiRequest) -> None:
        """The handler of GET. Raises ApiError."""
        http = request.http
        connects = http.method == "CONNECT"
        if not (connects or wants_websocket(http.fields)):
            raise ApiError(
                405,
                f"{http.path} takes POST, and GET only as the handshake of a WebSocket.",
                headers=[(b"allow", b"GET, POST")],
            )
        headers = accepted(http.fields, connects=connects)
        path, client, target = http.path, http.client, http.target
        kept = [each for each in http.headers if not _is_of_handshake(each[0])]

        def use(channel: Channel) -> ChannelUser:
            recent = RecentResponses(self._recent)
            fields = dict(reversed(kept))
            derived: dict[object, Any] = {SESSION: recent}
            head = RequestHead("POST", path, target, "1.1", kept, fields, 0, True, False, derived)
            socket = WebSocket(channel, self._max_message_bytes)
            socket.open(_Session(self._app, socket, head, client, recent))
            return socket

        http.sink.upgrade(headers, use)


class _Session:
    """One connection: see :class:`penstock.http.websocket.socket.MessageHandler`."""

    __slots__ = ("_app", "_client", "_head", "_queue", "_queued_bytes", "_recent", "_running", "_socket")

    def __init__(
        self,
        app: Application,
        socket: WebSocket,
        head: RequestHead,
        client: tuple[str, int] | None,
        recent: RecentResponses,
    ) -> None:
        """``head``: of each of its requests. ``client``: see :class:`HttpRequest`."""
        self._app = app
        self._socket = socket
        self._head = head
        self._client = client
        self._recent = recent
        self._queue: deque[tuple[bytes, _Envelope | None]] | None = None
        """Messages that wait, with what was read of them; None instead of an empty one: idle connections are
        many."""
        self._queued_bytes = 0
        self._running: MessageSink | None = None

    @property
    def busy(self) -> bool:
        return self._running is not None

    @property
    def full(self) -> bool:
        return self._queue is not None and (
            len(self._queue) >= MAX_QUEUED or self._queued_bytes >= MAX_QUEUED_BYTES
        )

    @property
    def held(self) -> int:
        running = self._running
        return self._queued_bytes + (0 if running is None else running.request.body_size)

    # -- messages

    def on_message(self, data: bytes) -> None:
        envelope = None
        if len(data) <= INLINE_BYTES:
            try:
                envelope = _read(data)
            except ApiError:
                pass  # told when it is its turn
            else:
                if envelope.type == CANCEL:
                    self._cancel(envelope)
                    return
        if self._queue is None:
            self._queue = deque()
        self._queue.append((data, envelope))
        self._queued_bytes += len(data)
        self._next()

    def _cancel(self, envelope: _Envelope) -> None:
        """End the response that runs, with what it has, if it is the one that is meant."""
        if self._running is None:
            return
        reply = self._running.listener
        if reply is None and envelope.response_id is None:
            self._running.cancelled = True
        elif isinstance(reply, StreamedReply) and envelope.response_id in (None, reply.format.id):
            reply.stop()

    def _next(self) -> None:
        """Begin the next request, unless one runs."""
        if self._running is not None or self._queue is None:
            return
        data, envelope = self._queue.popleft()
        self._queued_bytes -= len(data)
        if not self._queue:
            self._queue = None
        sink = MessageSink(self._socket, self._on_complete)
        head = self._head._replace(length=len(data))
        sink.request = http = HttpRequest(head, sink, self._client)
        http.add_body(data)
        http.body_complete = True
        self._running = sink
        run_eagerly(self._run(sink, data, envelope), self._socket.channel.state.tasks)

    async def _run(self, sink: MessageSink, data: bytes, envelope: _Envelope | None) -> None:
        http = sink.request
        try:
            try:
                if envelope is None:
                    envelope = await asyncio.to_thread(_read, data)
                if isinstance(lane := envelope.stream_id, str):
                    if len(lane) > MAX_STREAM_ID:
                        text = f"stream_id has {len(lane)} characters; {MAX_STREAM_ID} are allowed."
                        raise ApiError(400, text, param="stream_id")
                    sink.name_lane(lane)
                if envelope.type != CREATE:
                    given = shown(str(envelope.type))
                    raise ApiError(400, f"type is {given!r}; it takes {CREATE} and {CANCEL}.", param="type")
            except ApiError as error:
                await http.reply_error(error)
                return
            del data
            await self._app(http)
            if sink.cancelled and isinstance(sink.listener, StreamedReply):
                sink.listener.stop()
        except Exception:
            log.exception("the application failed")
            self._socket.close(FAILED, "The server failed.")
        finally:
            sink.release()
        if not (http.complete or http.disconnected or sink.listener):
            log.error("the application has not completed a reply")
            self._socket.close(FAILED, "The server failed.")

    def _on_complete(self) -> None:
        """A reply is complete. The next one begins later: many may be answered at once."""
        self._running = None
        asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._next()
        if self._running is None:
            self._socket.on_idle()
        self._socket.read_on()

    # -- what the WebSocket tells

    def on_written(self) -> None:
        reply = None if self._running is None else self._running.listener
        if isinstance(reply, StreamedReply):
            reply.choose_paths()

    def on_pause(self) -> None:
        if self._running is not None:
            self._running.on_pause()

    def on_resume(self) -> None:
        if self._running is not None:
            self._running.on_resume()

    def on_closed(self) -> None:
        self._queue, self._queued_bytes = None, 0
        running, self._running = self._running, None
        if running is not None:
            running.on_closed()
        self._recent.clear()


def _read(data: bytes) -> _Envelope:
    """Raises ApiError."""
    try:
        return _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(data, error) from None


def _is_of_handshake(name: bytes) -> bool:
    return name in _HANDSHAKE or name.startswith(b"sec-websocket-")
