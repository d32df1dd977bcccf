"""Writes the reply to one request as messages of a WebSocket."""

from __future__ import annotations

from penstock.gateway.websocket.server_message import ENDS, ERROR, error_message, in_lane, type_of
from penstock.http.errors import ApiError
from penstock.http.sink import Headers, Listener
from penstock.http.websocket.codec import FAILED, text_head
from penstock.http.websocket.socket import WebSocket
from penstock.streaming.sse_parser import SSEError, SSEParser

MAX_ERROR_BYTES = 64 << 10
"""Bytes of an error that its message has."""
BAD_GATEWAY = 502


class SocketSink:
    """What a request's reply is written to, as if it went over HTTP: events become messages, and any other
    reply an error. See :class:`~penstock.http.sink.ReplySink`."""

    write_target = None

    def __init__(self, socket: WebSocket, lane: str | None) -> None:
        self.continues = False
        """The request continues a response."""
        self.cancelled = False
        """The client has cancelled the response: a server that gets it is told so."""
        self.status = 0
        """Of the reply, as the client gets it; 0: it got none."""
        self._socket = socket
        self._lane = lane
        self._listener: Listener | None = None
        self._parser: SSEParser | None = None
        """None: the reply is no stream."""
        self._body = bytearray()
        self._headers: Headers = ()
        self._ended = self._gone = False
        """The last message was sent; the client has gone."""

    # -- the reply

    def listen(self, listener: Listener) -> None:
        self._listener = listener
        if self._gone:
            listener.on_disconnect()
        elif self._socket.channel.write_paused:
            listener.on_pause()

    def begin(self, status: int, headers: Headers) -> None:
        self.status, self._headers = status, headers
        kind = dict(headers).get(b"content-type", b"")
        if status == 200 and kind.lower().startswith(b"text/event-stream"):
            self._parser = SSEParser()

    def write_body(self, data: bytes) -> None:
        if self._parser is None:
            self._body += data[: MAX_ERROR_BYTES - len(self._body)]
            return
        try:
            events = self._parser.feed(data)
        except SSEError:
            self.cut()
            return
        if messages := [self._message(each.data) for each in events if each.data and each.data != b"[DONE]"]:
            self._write(*messages)

    def _message(self, data: bytes) -> bytes:
        kind = type_of(data)
        self._ended = self._ended or kind in ENDS
        return in_lane(error_message(data, BAD_GATEWAY)[1] if kind == ERROR else data, self._lane)

    def finish(self) -> None:
        if self._parser is None:
            if self.status >= 400:
                self._end(bytes(self._body))
            else:
                self.status = BAD_GATEWAY
                self._end(b'{"message":"no stream of events came","code":"upstream_broken"}')
            return
        if self._parser.pending:  # some servers leave out the empty line at the end
            self.write_body(b"\n\n")
        if not self._ended:
            self._end(b'{"message":"the response ended early","code":"upstream_broken"}')

    def refuse(self, error: ApiError) -> None:
        """The reply is an error of the gateway's own."""
        self.status, self._headers = error.status, error.headers
        self._end(error.body())

    def _end(self, body: bytes) -> None:
        """The last message is an error."""
        self._ended = True
        status = self.status if self.status >= 400 else BAD_GATEWAY
        status, message = error_message(body, status, self._headers, continues=self.continues)
        if self._parser is None:
            self.status = status
        self._write(in_lane(message, self._lane))

    def cut(self) -> None:
        """The client cannot have the rest."""
        self._socket.close(FAILED, "The response was broken off.")

    def _write(self, *messages: bytes) -> None:
        self._socket.send(b"".join([text_head(len(each)) + each for each in messages]))

    # -- the client

    def on_pause(self) -> None:
        if self._listener is not None:
            self._listener.on_pause()

    def on_resume(self) -> None:
        if self._listener is not None:
            self._listener.on_resume()

    def on_disconnect(self) -> None:
        self._gone = True
        if self._listener is not None:
            self._listener.on_disconnect()
