"""HTTP/1.1 client for model servers: pooled connections, replies as callbacks.

Streams are relayed from the callback that reads them, without a task or queue in between. Common clients
hand bodies to a coroutine, so none of them is used here.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Sequence
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

Headers = list[tuple[bytes, bytes]]

IDLE_S = 30.0
"""Seconds that an idle connection is kept; below the 75 s and 60 s of common servers."""
MOST_IDLE = 256
"""Idle connections kept per endpoint."""
MAX_OVERHEAD_BYTES = 256 << 10
"""Maximum bytes of a reply without content in between: interim replies, head, chunk extensions, trailers."""
PIECE_BYTES = 4 << 10
"""Bytes that are processed at a time. The loop reads up to 256 KiB at once: half a second for tiny events."""
TURN_S = 0.002
"""A piece after which processing has taken longer is the connection's last one in this turn of the loop."""


class UpstreamError(ConnectionError):
    """No connection to the endpoint, or it broke."""


class ReplyReceiver(Protocol):
    """Gets one reply: on_head, any number of on_body, then on_end or on_broken."""

    def on_head(self, status: int, headers: Headers) -> None: ...

    def on_body(self, data: bytes) -> None:
        """The next content, without transfer encoding, at most :data:`PIECE_BYTES`."""
        ...

    def on_end(self) -> None: ...

    def on_broken(self, reason: str) -> None:
        """The connection broke before the end. Not called after :meth:`Connection.abort`."""
        ...


class Connection(asyncio.Protocol):
    """One connection to an endpoint. It carries one request after the other."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport
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
        self.answered = False
        """Bytes of the reply to the latest request have come."""
        self.was_used = False
        """It has carried a reply before, so the server may have closed it meanwhile."""

    @property
    def authority(self) -> bytes:
        """Value of the host header."""
        return self._pool.authority

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._receiver is None:
            self._transport.abort()  # a reply without a request
            return
        self.answered = True
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
                self._break(f"not HTTP/1.1: {error}")
                return
            self._reusable = False  # bytes that nobody asked for follow the reply
        if self._body:
            self._overhead = 0
            body = b"".join(self._body)
            self._body.clear()
            if self._receiver is not None and not self._bodyless:  # it may be sent nevertheless
                self._receiver.on_body(body)
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
        asyncio.get_running_loop().call_soon(self._take_turn)

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
        if not self._unread and self._ends_with_connection():
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self._reusable = False
        self._pool.forget(self)
        self._lost = str(exc) if exc else "the connection was closed before the reply was complete"
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
        self._has_head = True
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

    def send(self, request: bytes, receiver: ReplyReceiver) -> None:
        """Send a request. ``receiver`` gets the reply, or on_broken if the connection broke while idle."""
        self._receiver = receiver
        self._bodyless = request.startswith(b"HEAD ")
        self._parser = httptools.HttpResponseParser(self)
        self._complete = self.answered = self._has_head = False
        self._overhead = 0
        if self.usable:
            self._transport.write(request)
        else:  # connection_lost, called only once, may be over
            asyncio.get_running_loop().call_soon(self._break, "the connection was closed")

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
            self._pool.release(self)
        else:
            self._transport.close()
        receiver.on_end()

    def _break(self, reason: str) -> None:
        receiver, self._receiver = self._receiver, None
        self._transport.abort()
        if receiver is not None:
            receiver.on_broken(reason)


class ConnectionPool:
    """Connections to one endpoint. Times are those of the event loop."""

    def __init__(
        self,
        url: str,
        *,
        connect_timeout_s: float,
        address: str | None = None,
    ) -> None:
        """``url`` has a scheme, a host and optionally a port; ``address`` is one of the host's addresses."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._name = parts.hostname
        self._address = address or parts.hostname
        self._port = port_of(url)
        self.authority = parts.netloc.encode()
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[Connection] = []
        self._closed = False

    async def acquire(self, *, fresh: bool = False) -> Connection:
        """An idle connection or a new one; ``fresh``: a new one. Raises UpstreamError."""
        now = asyncio.get_running_loop().time()
        while self._idle and not fresh:
            connection = self._idle.pop()
            if connection.usable and now - connection.idle_since < IDLE_S:
                return connection
            connection.close()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(self),
                    self._address,
                    self._port,
                    ssl=self._tls,
                    server_hostname=self._name if self._tls is not None else None,
                )
        except TimeoutError:
            raise UpstreamError(f"no connection within {self._connect_timeout_s:g} s") from None
        except (OSError, ssl.SSLError) as error:
            raise UpstreamError(f"no connection: {error}") from None
        return connection

    def release(self, connection: Connection) -> None:
        """Take back a connection whose reply is complete, for the next request."""
        if self._closed or len(self._idle) >= MOST_IDLE:
            connection.close()
            return
        connection.was_used = True
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        """Remove a closed connection."""
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Close idle connections immediately, the others when their replies are complete."""
        self._closed = True
        for connection in list(self._idle):
            connection.close()
        self._idle.clear()


def port_of(url: str) -> int:
    """The port of a URL, or its scheme's default. Raises ValueError for an invalid port."""
    parts = urlsplit(url)
    return parts.port or (443 if parts.scheme == "https" else 80)


_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
"""Headers that apply to one connection only (RFC 9110 §7.6.1)."""


def without_hop_by_hop(headers: Sequence[tuple[bytes, bytes]]) -> Headers:
    """The end-to-end headers: without hop-by-hop headers, and without those that ``connection`` names."""
    named = {
        token.strip().lower()
        for name, value in headers
        if name == b"connection"
        for token in value.split(b",")
    }
    return [(name, value) for name, value in headers if name not in _HOP_BY_HOP and name not in named]


def request_bytes(
    method: bytes, target: bytes, authority: bytes, headers: Sequence[tuple[bytes, bytes]], body: bytes
) -> bytes:
    """The bytes of an HTTP/1.1 request. ``headers`` are end-to-end headers; host and content-length are
    replaced, expect is dropped because the body is sent without waiting for 100 (Continue)."""
    lines = [b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (method, target, authority)]
    lines += [
        b"%b: %b\r\n" % (name, value)
        for name, value in headers
        if name not in (b"host", b"content-length", b"expect")
    ]
    if body or method not in (b"GET", b"HEAD"):
        lines.append(b"content-length: %d\r\n" % len(body))
    return b"".join([*lines, b"\r\n", body])
