"""A connection to a model server over HTTP/1.1: one request after the other, replies as callbacks."""

from __future__ import annotations

import asyncio
import fcntl
import select
import struct
import termios
import time
from typing import Protocol, cast

import httptools

from penstock.gateway.upstream.exchange import (
    IDLE_CLOSE_S,
    MAX_OVERHEAD_BYTES,
    PIECE_BYTES,
    REPLACED,
    TURN_S,
    Failure,
    Headers,
    ReplyReceiver,
    UpstreamError,
    UpstreamRequest,
)
from penstock.gateway.upstream.reply_scanner import Lane, PlainEventRelay
from penstock.http.tls_problem import ALERT, tls_problem


class ConnectionOwner(Protocol):
    """Whoever keeps connections while they are idle."""

    def release(self, connection: Http1Connection) -> None:
        """Take back a connection whose reply is complete, for the next request."""
        ...

    def forget(self, connection: Http1Connection) -> None:
        """The connection is closed."""
        ...

    def on_answered(self) -> None:
        """The head of a reply has come."""
        ...

    @property
    def unheard(self) -> str:
        """What may be the reason why a server sends nothing, as a part of a sentence."""
        ...

    def on_unanswered(self) -> None:
        """A new connection broke before the head of a reply: the server may not speak HTTP/1.1 any more."""
        ...


class Http1Connection(asyncio.Protocol):
    """One connection to an endpoint. It carries one request after the other."""

    def __init__(self, owner: ConnectionOwner, authority: bytes) -> None:
        """``authority``: value of the host header."""
        self._owner = owner
        self._authority = authority
        self._transport: asyncio.Transport
        self._loop = asyncio.get_running_loop()
        self._receiver: ReplyReceiver | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._headers: Headers = []
        self._body: list[bytes] = []
        self.on_body = self._body.append  # httptools' callback for each piece of content
        self._overhead = 0
        """Bytes received since the latest piece of content."""
        self._complete = self._has_head = False
        self._unread = b""
        """Bytes that have come and are not processed; the transport does not read while there are any."""
        self._paused = False
        """By the receiver, whose client is slow."""
        self._waits_for_turn = False
        self._ended = False
        """The server has ended the connection in order."""
        self._lost: str | None = None
        """Why the connection was lost; None: it was not."""
        self._bodyless = False
        """The request is HEAD: the reply has the length of a body, but no body."""
        self._reusable = True
        self.idle_since = 0.0
        self._answered = False
        """Bytes of the reply to the latest request have come."""
        self.was_used = False
        """It has carried a reply before, so the server may have closed it meanwhile."""
        self._sent_at = 0.0
        self._request_size = 0
        self._unprocessed = False
        """The server has not got the latest request."""

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._receiver is None:
            self._transport.abort()  # a reply without a request
            return
        self._answered = True
        if self._unread or self._waits_for_turn:
            self._unread += data  # TLS may have read on
        else:
            self._process(data)

    def _process(self, data: bytes) -> None:
        """Process what has come, as far as this turn of the event loop and the receiver allow."""
        at, size, started = 0, len(data), time.perf_counter()
        while True:
            piece = data if size <= PIECE_BYTES else data[at : at + PIECE_BYTES]
            at += PIECE_BYTES
            self._process_piece(piece, last=at >= size)
            if self._receiver is None:
                return
            late = time.perf_counter() - started > TURN_S
            if late or self._paused or at >= size:
                break
        if at < size:
            self._unread = data[at:]
        if late:
            self._wait_for_turn()
        if self._lost is not None and not self._unread:
            self._on_lost()

    def _process_piece(self, piece: bytes, *, last: bool) -> None:
        """``last``: nothing has come behind it."""
        assert self._parser is not None
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            self._break("it switched protocols, which it was not asked to")
            return
        except httptools.HttpParserError as error:
            if not self._complete:
                tls = ": it speaks TLS, https:// instead?" if piece.startswith(ALERT) else f": {error}"
                self._break(f"not HTTP/1.1{tls}")
                return
            self._reusable = False  # bytes that nobody asked for follow the reply
        if self._body:
            self._overhead = 0
            body = b"".join(self._body)
            self._body.clear()
            if self._receiver is not None and not self._bodyless:  # it may be sent nevertheless
                self._receiver.on_body(body, self._loop.time())
        else:
            self._overhead += len(piece)
            if self._overhead > MAX_OVERHEAD_BYTES and not self._complete:
                self._break(f"more than {MAX_OVERHEAD_BYTES} bytes of headers or trailers")
                return
        if self._complete and self._receiver is not None:
            self._reusable = self._reusable and last
            self._finish()

    def _wait_for_turn(self) -> None:
        """Continue in the next turn of the event loop, after other connections."""
        self._waits_for_turn = True
        if not self._transport.is_closing():
            self._transport.pause_reading()
        self._loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._waits_for_turn = False
        if self._paused:
            return
        if self._unread:
            data, self._unread = self._unread, b""
            self._process(data)
        if not (self._waits_for_turn or self._paused or self._transport.is_closing()):
            self._transport.resume_reading()

    def eof_received(self) -> None:
        self._ended = True
        if self._receiver is not None and not self._answered:
            self._unprocessed = self._unacknowledged() >= self._request_size
        if not self._unread and self._ends_with_connection():
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self._reusable = False
        self._owner.forget(self)
        self._lost = "the connection was closed before the reply was complete"
        if exc is not None:
            self._lost = tls_problem(exc) or str(exc)
        if self._receiver is not None and not self._answered:
            self._lost += self._owner.unheard
        if not self._unread:
            self._on_lost()

    def _on_lost(self) -> None:
        """The connection is lost, and what came before is processed."""
        assert self._lost is not None
        if self._ended and self._ends_with_connection():
            self._finish()
        else:
            self._break(self._lost)
        self._parser = None  # breaks a reference cycle

    def _ends_with_connection(self) -> bool:
        """Whether the end of the connection ends the reply: a body without a length."""
        return self._receiver is not None and self._has_head and not self._is_framed()

    # -- httptools

    def on_message_begin(self) -> None:
        if self._complete:
            raise UpstreamError("a second reply to one request")
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # a trailer is not passed on
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status < 100:
            raise UpstreamError(f"status {status}")
        if status < 200 or self._receiver is None:
            return
        codings = [value for name, value in self._headers if name == b"transfer-encoding"]
        if codings and [coding.strip().lower() for coding in codings] != [b"chunked"]:
            raise UpstreamError("a transfer coding that nobody has asked for")
        self._has_head = True
        self._owner.on_answered()
        self._reusable = self._parser.should_keep_alive()
        self._receiver.on_head(status, self._headers)
        if self._bodyless:
            self._complete, self._reusable = True, False  # the parser would wait for a body

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if self._parser.get_status_code() >= 200:
            self._complete = True

    # -- called by the relay

    @property
    def usable(self) -> bool:
        return self._reusable and not self._transport.is_closing()

    def is_silent(self) -> bool:
        """Whether nothing has come since the last reply, nor waits for the event loop to read it: its
        end, or another reply, which would be taken for the one to the next request."""
        if not self.usable:
            return False
        incoming = select.poll()
        incoming.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not incoming.poll(0)

    def send(self, request: UpstreamRequest, receiver: ReplyReceiver) -> None:
        """Send a request. ``receiver`` gets the reply, or on_broken if the connection broke while idle."""
        self._receiver = receiver
        self._bodyless = request.method == b"HEAD"
        self._parser = httptools.HttpResponseParser(self)
        self._complete = self._answered = self._has_head = False
        self._overhead = 0
        self._sent_at = self._loop.time()
        self._unprocessed = not self.usable
        if self.usable:
            data = request_bytes(request, self._authority)
            self._request_size = len(data)
            self._transport.write(data)
        else:  # connection_lost, called only once, may be over
            self._loop.call_soon(self._break, "the connection was closed")

    def abort(self) -> None:
        """Discard the rest of the reply; closing the connection cancels the request at the server."""
        self._receiver, self._unread = None, b""
        self._reusable = False
        self._transport.abort()

    def pause(self, receiver: ReplyReceiver) -> None:
        """Stop reading. Ignored unless ``receiver`` gets the current reply: its client may still be slow when
        the connection already carries another request."""
        if self._receiver is receiver:
            self._paused = True
            if not self._transport.is_closing():
                self._transport.pause_reading()

    def resume(self, receiver: ReplyReceiver) -> None:
        """Continue reading after :meth:`pause`."""
        if self._receiver is receiver:
            self._paused = False
            if self._unread and not self._waits_for_turn:
                self._wait_for_turn()
            elif not (self._waits_for_turn or self._transport.is_closing()):
                self._transport.resume_reading()

    has_lanes = False

    def enter_lane(self, lane: Lane, relay: PlainEventRelay) -> int:
        return 0

    def leave_lane(self, relayed: int) -> None:
        raise AssertionError("it has no lanes")

    def close(self) -> None:
        self._transport.close()

    def _is_framed(self) -> bool:
        return any(name in (b"content-length", b"transfer-encoding") for name, _ in self._headers)

    def _finish(self) -> None:
        receiver, self._receiver = self._receiver, None
        self._paused = False
        assert receiver is not None
        if self._transport.get_write_buffer_size():
            self._transport.abort()  # the server answered without reading the whole request
        elif self.usable:
            self._transport.resume_reading()
            self._owner.release(self)
        else:
            self._transport.close()
        receiver.on_end()

    def _break(self, reason: str) -> None:
        receiver, self._receiver = self._receiver, None
        self._transport.abort()
        if receiver is None:
            return
        if not (self.was_used or self._has_head):
            self._owner.on_unanswered()
        if self._unprocessed:
            receiver.on_broken(f"the connection was closed before the request: {reason}", Failure.UNPROCESSED)
        elif self._was_idle_closed():
            receiver.on_broken(f"the idle connection was closed: {reason}", Failure.IDLE_CLOSED)
        else:
            receiver.on_broken(reason, Failure.NETWORK)

    def _unacknowledged(self) -> int:
        """Bytes sent that the server's system has not acknowledged. With the end of a connection it
        acknowledges all that it has got before: there are none if the server has read the request."""
        descriptor = self._transport.get_extra_info("socket").fileno()
        try:
            (queued,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))
        except OSError:
            return 0
        return int(queued) + self._transport.get_write_buffer_size()

    def _was_idle_closed(self) -> bool:
        """Whether the server may have closed the idle connection before it got the request. It answers with a
        reset at once then; a server that breaks the connection later may have run the request."""
        waited_s = self._loop.time() - self._sent_at
        return self.was_used and not self._answered and waited_s <= IDLE_CLOSE_S


def request_bytes(request: UpstreamRequest, authority: bytes) -> bytes:
    """The bytes of an HTTP/1.1 request. ``authority``: value of the host header."""
    method, target, headers, body = request
    lines = [b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (method, target, authority)]
    lines += [b"%b: %b\r\n" % header for header in headers if header[0] not in REPLACED]
    if body or method not in (b"GET", b"HEAD"):
        lines.append(b"content-length: %d\r\n" % len(body))
    return b"".join([*lines, b"\r\n", body])
