"""The events of one reply as messages of a WebSocket: the sink of one request of several on a connection.

An event of a stream, ``event: NAME`` and ``data: JSON``, is the text message JSON. An error is a message of
type ``error`` with the reply's status. What comes in pieces, because it takes long to make, is sent as
fragments of one message, so that it is nowhere held whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from penstock.http.errors import encode_json
from penstock.http.request import HttpRequest
from penstock.http.sink import EVENT_STREAM, Headers, Listener, StreamKind
from penstock.http.websocket.channel import Channel, ChannelUser
from penstock.http.websocket.codec import frame_head, text_head
from penstock.http.websocket.messages import EVENT_END, message_of
from penstock.http.websocket.socket import WebSocket
from penstock.http.write_target import WriteTarget

_SHOWN = frozenset({b"retry-after", b"retry-after-ms", b"x-should-retry"})
"""Headers of an error that its message repeats."""
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class MessageSink:
    """See :class:`penstock.http.sink.Sink`."""

    __slots__ = ("_fragmented", "_lane", "_listener", "_on_complete", "_socket", "cancelled", "request")

    def __init__(self, socket: WebSocket, on_complete: Callable[[], None]) -> None:
        """``on_complete`` is called at the end of the reply."""
        self._socket = socket
        self._lane = b""
        """A member that every message gets, with a comma; may be empty."""
        self._on_complete = on_complete
        self._listener: Listener | None = None
        self.cancelled = False
        """Whether the client has cancelled the response before it began."""
        self._fragmented = False
        """Whether a message is begun and not complete."""
        self.request: HttpRequest
        """Set at once: the request that is answered."""

    def name_lane(self, stream_id: str) -> None:
        """Repeat the ``stream_id`` of the request in each message."""
        self._lane = b'"stream_id":%b,' % encode_json(stream_id)

    # -- what the WebSocket tells

    @property
    def listener(self) -> Listener | None:
        """What goes on with the reply without its application."""
        return self._listener

    def on_pause(self) -> None:
        if self._listener is not None:
            self._listener.on_pause()

    def on_resume(self) -> None:
        if self._listener is not None:
            self._listener.on_resume()
        self.request.wake()

    def on_closed(self) -> None:
        """The client is gone."""
        self.request.disconnected = True
        self.request.wake()
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.on_disconnect()

    # -- as a sink of events

    @property
    def write_target(self) -> WriteTarget | None:
        return None if self._fragmented or self._lane else self._socket.channel.write_target

    @property
    def write_paused(self) -> bool:
        return self._socket.channel.write_paused

    def listen(self, listener: Listener) -> None:
        if self.request.disconnected:
            listener.on_disconnect()
            return
        self._listener = listener
        if self.write_paused:
            listener.on_pause()

    def release(self, kept: int = 0) -> None:
        self.request.body_size = kept

    def on_body_wanted(self) -> None:
        """It has come whole."""

    def unread(self) -> int:
        return self._socket.channel.unread()

    def cut(self) -> None:
        self._listener = None
        self._socket.abort()

    def send(self, data: bytes, *, last: bool, kind: StreamKind = EVENT_STREAM) -> None:
        request = self.request
        if not request.started:
            request.started, request.status, request.streamed, request.events = True, 200, True, kind
        if data:
            self.write(data)
        if last:
            self._complete()

    def write(self, data: bytes) -> None:
        whole = data.split(EVENT_END)
        rest = whole.pop()
        if len(whole) == 1 and not (rest or self._fragmented or self._lane) and data[0] == 101:  # e
            message = message_of(whole[0])
            self._socket.send(text_head(len(message)) + message)
            return
        made = []
        for event in whole:
            if event.startswith(b":") and not self._fragmented:  # a comment, against silence
                self._socket.ping()
            else:
                made.append(self._frame(event, last=True))
        if rest:
            made.append(self._frame(rest, last=False))
        self._socket.send(b"".join(made))

    def _frame(self, part: bytes, *, last: bool) -> bytes:
        """A part of an event; ``last``: with its end."""
        first = not self._fragmented
        if first:
            part = message_of(part)
            if self._lane:
                part = b"{%b%b" % (self._lane, part[1:])
        self._fragmented = not last
        return frame_head(len(part), first=first, last=last) + part

    # -- other replies

    def reply(self, status: int, headers: Headers, body: bytes) -> None:
        """An error. ``body``: a JSON object with the member ``error``."""
        self.request.started, self.request.status = True, status
        error = _decode(body)["error"]
        if not isinstance(error["code"], str):  # clients expect none or a name; the status is beside it
            error["code"] = None
        message = {"type": "error", "status": status, "error": error}
        shown = {name.decode(): value.decode("latin-1") for name, value in headers if name in _SHOWN}
        if shown:  # openai's client looks in the error for them, Codex beside it
            message["headers"] = error["headers"] = shown
        made = encode_json(message)
        if self._lane:
            made = b"{%b%b" % (self._lane, made[1:])
        self._socket.send(text_head(len(made)) + made)
        self._complete()

    def begin(self, status: int, headers: Headers) -> None:
        raise AssertionError("requests of a WebSocket are answered by events")

    def write_body(self, data: bytes) -> None:
        raise AssertionError("likewise")

    def finish(self) -> None:
        raise AssertionError("likewise")

    def upgrade(self, headers: Headers, use: Callable[[Channel], ChannelUser]) -> None:
        raise AssertionError("it is a WebSocket")

    def _complete(self) -> None:
        self._listener = None
        self.request.complete = True
        self.request.wake()
        self._on_complete()
