"""A connection to a model server over HTTP/1.1: one request after the other, replies as callbacks."""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import struct
import termios
import time
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from penstock.gateway.upstream.exchange import (
    IDLE_CLOSE_S,
    PIECE_BYTES,
    TURN_S,
    Failure,
    Headers,
    ReplyReceiver,
    UpstreamRequest,
)
from penstock.gateway.upstream.reply_scanner import PlainEventRelay, PlainEventShape, plain_chunk
from penstock.gateway.upstream.request_form import AS_GIVEN, RequestForm
from penstock.http.http1.chunks import LAST_CHUNK, chunk
from penstock.http.http1.reply_reader import ReplyFault, ReplyReader
from penstock.http.tls_problem import tls_problem

if TYPE_CHECKING:
    from penstock.gateway.upstream.connection_pool import ConnectionPool

NO_WINDOW = 1 << 62
"""Bytes of plain events that may come before anything else has to be done for more to come."""
MAX_LAST_BYTES = 64 << 10
"""Bytes that are read of a connection whose server has closed it while it was sent a body: an error's head
and body."""


class Upload:
    """The rest of a body: whether it is ``chunked``, and whether the server takes more of it."""

    def __init__(self, *, chunked: bool) -> None:
        self.chunked = chunked
        self.writable = asyncio.Event()
        self.writable.set()


class Http1UpstreamConnection(asyncio.Protocol):
    """One connection to an endpoint. It carries one request after the other."""

    def __init__(self, owner: ConnectionPool, authority: bytes) -> None:
        """``authority``: value of the host header."""
        self._owner = owner
        self._authority = authority
        self._transport: asyncio.Transport
        self._loop = asyncio.get_running_loop()
        self._receiver: ReplyReceiver | None = None
        self._reader = ReplyReader(self._on_head)
        self._unread = b""
        """Bytes that have come and are not processed; the transport does not read while there are any."""
        self._between_chunks = False
        """What comes next begins a chunk of the reply."""
        self._fast_path: tuple[PlainEventShape, PlainEventRelay] | None = None
        """How its plain events look, and where they go; None: they are none."""
        self._paused = False
        """Whether the receiver, whose client is slow, has paused the connection."""
        self._waits_for_turn = False
        self._ended = False
        """The server has ended the connection in order."""
        self._lost: str | None = None
        """Why the connection was lost; None: it was not."""
        self._reusable = True
        self.idle_since = 0.0
        self._answered = False
        """Bytes of the reply to the latest request have come."""
        self.was_used = False
        """Whether the connection has carried a reply before, so the server may have closed it meanwhile."""
        self._sent = 0.0, 0
        """When the latest request was sent, and its bytes; of a body with a rest the beginning counts."""
        self._unprocessed = False
        """The server has not got the latest request."""
        self._upload: Upload | None = None
        """The rest of the latest request's body; None: it has been sent whole."""

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def pause_writing(self) -> None:
        if self._upload is not None:
            self._upload.writable.clear()

    def resume_writing(self) -> None:
        if self._upload is not None:
            self._upload.writable.set()

    def data_received(self, data: bytes) -> None:
        if self._fast_path is not None and self._relay_plain(data, *self._fast_path):
            return
        if self._receiver is None:
            self._transport.abort()  # a reply without a request
            return
        self._answered = True
        if self._unread or self._waits_for_turn:
            self._unread += data  # TLS may have read on
        else:
            self._process(data)

    def _relay_plain(self, data: bytes, shape: PlainEventShape, relay: PlainEventRelay) -> bool:
        """Relay ``data`` if it is a chunk with a plain event alone. The parser, which waits for the next
        chunk, need not see it."""
        found = None if self._unread or self._waits_for_turn else plain_chunk(data, shape)
        if found is None:
            self._fast_path = None  # what follows must not overtake it
            return False
        event, text = found
        relay.relay_events([shape.slot], [event], [text], self._loop.time())
        return True

    def _process(self, data: bytes) -> None:
        """Process what has come, as far as this turn of the event loop and the receiver allow."""
        at, size, started, reader = 0, len(data), time.perf_counter(), self._reader
        while True:
            piece = data if size <= PIECE_BYTES else data[at : at + PIECE_BYTES]
            at += PIECE_BYTES
            try:
                content = reader.feed(piece)
            except ReplyFault as fault:
                self._break(str(fault))
                return
            if content and self._receiver is not None:
                # An event ends so: then the rest of this is the end of its chunk.
                self._between_chunks = at >= size and piece.endswith(b"\n\n\r\n")
                self._receiver.on_body(content, self._loop.time())
            if self._receiver is None:
                return
            if reader.complete:
                self._reusable = self._reusable and reader.keeps_alive and at >= size
                self._finish()
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
            self._unprocessed = self._unacknowledged() >= self._sent[1]
        if not self._unread and self._ends_with_connection():
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self._reusable = False
        if self._end_upload():
            self._read_last()
        self._owner.forget(self)
        self._lost = "the connection was closed before the reply was complete"
        if exc is not None:
            self._lost = tls_problem(exc) or str(exc)
        if self._receiver is not None and not self._answered:
            self._lost += self._owner.unheard
        if not self._unread:
            self._on_lost()

    def _read_last(self) -> None:
        """Read what the server has answered before it closed the connection, in the middle of an upload: the
        error of a write hides it."""
        if self._receiver is None or self._transport.get_extra_info("ssl_object") is not None:
            return
        with suppress(OSError):
            self.data_received(os.read(self._transport.get_extra_info("socket").fileno(), MAX_LAST_BYTES))

    def _on_lost(self) -> None:
        """The connection is lost, and what came before is processed."""
        assert self._lost is not None
        if self._ended and self._ends_with_connection():
            self._finish()
        else:
            self._break(self._lost)
        self._reader.close()

    def _ends_with_connection(self) -> bool:
        """Whether the end of the connection ends the reply."""
        return self._receiver is not None and self._reader.ends_with_connection

    def _on_head(self, status: int, headers: Headers) -> None:
        if self._receiver is not None:
            self._owner.on_answered()
            self._receiver.on_head(status, headers)

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
        self._reader.begin(bodyless=request.method == b"HEAD")
        self._answered = self._between_chunks = False
        self._fast_path = None
        self._sent = self._loop.time(), 0
        usable = self.usable
        self._unprocessed = not usable
        if usable:
            if request.rest != 0:
                self._upload = Upload(chunked=request.rest is None)
            data = request_bytes(request, self._authority, self._owner.upstream.form)
            self._sent = self._sent[0], len(data)
            self._transport.write(data)
        else:  # connection_lost, called only once, may be over
            self._loop.call_soon(self._break, "the connection was closed")

    async def send_part(self, data: bytes) -> None:
        upload = self._upload
        if upload is None:
            return
        await upload.writable.wait()
        if self._upload is not upload:
            return
        if not data:
            self._upload = None
        if part := (data and chunk(data)) or LAST_CHUNK if upload.chunked else data:
            self._transport.write(part)

    def _end_upload(self) -> bool:
        """Send nothing more of a body; returns whether more was to follow."""
        upload, self._upload = self._upload, None
        if upload is None:
            return False
        upload.writable.set()
        return True

    def abort(self) -> None:
        """Discard the rest of the reply; closing the connection cancels the request at the server."""
        self._receiver, self._unread = None, b""
        self._reusable = False
        self._end_upload()
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

    def enter_fast_path(self, shape: PlainEventShape, relay: PlainEventRelay, size: int) -> int:
        if not self._between_chunks or self._paused:
            return 0
        self._fast_path = shape, relay
        return NO_WINDOW

    def leave_fast_path(self, relayed: int) -> None:
        self._fast_path = None

    def close(self) -> None:
        self._transport.close()

    def _finish(self) -> None:
        receiver, self._receiver = self._receiver, None
        self._paused = False
        assert receiver is not None
        if self._end_upload() or self._transport.get_write_buffer_size():
            self._transport.abort()  # the server answered without reading the whole request
        elif self.usable:
            self._transport.resume_reading()
            self._owner.release(self)
        else:
            self._transport.close()
        receiver.on_end()

    def _break(self, reason: str) -> None:
        receiver, self._receiver = self._receiver, None
        self._end_upload()
        self._transport.abort()
        if receiver is None:
            return
        if not (self.was_used or self._reader.has_head):
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
        waited_s = self._loop.time() - self._sent[0]
        return self.was_used and not self._answered and waited_s <= IDLE_CLOSE_S


def request_bytes(request: UpstreamRequest, authority: bytes, form: RequestForm = AS_GIVEN) -> bytes:
    """The bytes of an HTTP/1.1 request. ``authority``: value of the host header."""
    method, target, headers, body, rest = request
    if form.rewrites:
        target = form.target(target)
    lines = [b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (method, target, authority)]
    lines += [b"%b: %b\r\n" % header for header in headers if header[0] not in form.dropped]
    lines.append(form.lines)
    if rest is None:
        lines.append(b"transfer-encoding: chunked\r\n")
        body = chunk(body)
    elif body or method not in (b"GET", b"HEAD"):
        lines.append(b"content-length: %d\r\n" % (len(body) + rest))
    return b"".join([*lines, b"\r\n", body])
