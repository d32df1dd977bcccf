"""The HTTP/1.1 server protocol: one object per client connection; reply bytes reach the socket here.

Extends uvicorn's :class:`HttpToolsProtocol` for many long streams: streamed replies write to the connection
directly, connections and request times are limited, slow clients are cut (:mod:`penstock.http.slow_clients`;
``generation/streamed.py`` limits the backlog of a stream), and errors have OpenAI's shape. It relies on
private parts of uvicorn; ``tests/http/test_uvicorn_contract.py`` names all of them.
"""

from __future__ import annotations

import logging
import time
from asyncio import current_task
from collections.abc import Callable, Sequence
from http.client import responses
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from penstock.http.admission import unavailable
from penstock.http.connection_settings import ConnectionSettings
from penstock.http.errors import ApiError
from penstock.http.sink import Listener
from penstock.http.slow_clients import SlowClientTimer, Verdict
from penstock.streaming.chunked import LAST_CHUNK, chunk, unframed

log = logging.getLogger(__name__)

EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies such as nginx must not buffer events
]
HIGH_WATER_BYTES = 16 * 1024
"""Unsent bytes of a connection from which on its client counts as not reading."""


def _lines(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    return b"".join([b"%b: %b\r\n" % header for header in headers])


_EVENTS_HEAD = b"HTTP/1.1 200 OK\r\n" + _lines(EVENT_STREAM_HEADERS)
_CLOSE = b"connection: close\r\n"


class ServerProtocol(HttpToolsProtocol):
    """One connection. It is itself the :class:`penstock.http.sink.Sink` of the reply in progress.

    ``config.loaded_app`` is called with the ASGI arguments and this connection as the fourth one.
    """

    write: Callable[[bytes], object]

    def __init__(
        self, config: uvicorn.Config, server_state: ServerState, settings: ConnectionSettings
    ) -> None:
        super().__init__(config, server_state, {})
        self._settings = settings
        self._limits = settings.limits

    # -- per connection

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._chunks = True
        """Whether the client of the request in progress supports chunked encoding (HTTP/1.1)."""
        self._bodyless = False
        """Whether the reply that :meth:`begin` started has no body."""
        self._framed = False
        """Whether its body is chunked."""
        self.write = self._write_chunks = transport.write
        plain = transport.get_extra_info("sslcontext") is None
        own = transport.get_extra_info("socket") if plain else None
        self._descriptor = -1 if own is None else own.fileno()
        # Half of the backlog is for bytes written before the client counts as slow, half for later ones.
        transport.set_write_buffer_limits(min(HIGH_WATER_BYTES, self._limits.max_backlog // 2))
        self.timer = SlowClientTimer(time.monotonic())
        self._listener: Listener | None = None
        self._reply_headers: Sequence[tuple[bytes, bytes]] = ()
        """Headers that the application adds to a streamed reply."""
        self._active: RequestResponseCycle | None = None
        """The request that is being answered."""
        self._head: int | None = None
        """While a request head is incomplete: its bytes in reads after the first."""
        self._head_is_new = False
        """Whether the head began in the latest read."""
        self._read_size = 0
        self._refusal: ApiError | None = None
        """Why the parser was made to fail."""
        if len(self.connections) > self._limits.max_connections:
            self._refuse(unavailable("Too many connections to this server.", "too_many_connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._descriptor = -1  # about to be closed; another connection may get the number
        self.timer.on_close()
        self._abandon()
        self._active = None
        # Breaks reference cycles.
        self.scope = self.cycle = None  # type: ignore[assignment]
        self.pipeline.clear()
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.on_disconnect()
        self._settings.on_lost()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._listener is not None:
            self._listener.on_pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._listener is not None:
            self._listener.on_resume()

    def data_received(self, data: bytes) -> None:
        self._read_size = len(data)
        self._head_is_new = False
        super().data_received(data)
        if self._head is not None and not self._head_is_new:
            self._head += len(data)
            if self._head > self._limits.max_header_bytes and not self.transport.is_closing():
                self._refuse(self._head_too_large())

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or ApiError(400, msg))

    def _refuse(self, error: ApiError) -> None:
        """Answer without the application and close. Replies in progress are completed instead, as the last
        ones."""
        active = self._active
        if (
            active is not None
            and not active.response_complete
            and (active.response_started or active is not self.cycle or not active.more_body)
        ):
            self._close_after_replies(active)
            return
        self._settings.on_refusal(error)
        body = error.body()
        more = _lines(error.headers)
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b%b\r\n%b"
            % (error.status, responses[error.status].encode(), len(body), more, _CLOSE, body)
        )
        self.transport.close()

    def _head_too_large(self) -> ApiError:
        limit = self._limits.max_header_bytes
        return ApiError(
            431,
            f"The request line and headers are larger than the {limit} bytes allowed by --max-header-bytes.",
        )

    def _close_after_replies(self, active: RequestResponseCycle) -> None:
        """Answer the complete requests; the last one cannot be answered."""
        if self.pipeline and self.pipeline[0][0].more_body:
            self.pipeline.popleft()  # the newest one stays incomplete
        last = self.pipeline[0][0] if self.pipeline else active
        last.keep_alive = False
        self.flow.pause_reading()

    def cut_if_slow(self, now: float, request_timeout_s: float, keep_alive_s: float) -> None:
        """Close or abort the connection if its client is too slow. The server's sweep calls it."""
        unread, active = self.unread(), self._active
        replying = (
            active is not None and not active.response_complete and (active.chunked_encoding or not unread)
        )
        verdict = self.timer.check(
            now,
            request_timeout_s,
            keep_alive_s,
            reading=not self.flow.read_paused,
            replying=replying,
            unread=unread,
        )
        match verdict:
            case Verdict.REQUEST_TIMEOUT:
                text = f"The request did not arrive within {request_timeout_s:g} s."
                self._refuse(ApiError(408, text, type="TimeoutError"))
            case Verdict.IDLE:
                self.transport.close()
            case Verdict.NOT_READING:
                self.transport.abort()

    # -- per request

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.timer.on_request_begin(time.monotonic())
        self._head, self._head_is_new = 0, True

    def on_headers_complete(self) -> None:
        limit = self._limits.max_header_bytes
        # One short read cannot exceed the limit, so most heads are not counted.
        if (not self._head_is_new or self._read_size > limit) and self._head_size() > limit:
            self._refusal = self._head_too_large()
            raise self._refusal
        self._head = None
        super().on_headers_complete()

    def _head_size(self) -> int:
        """Approximate size of the request line and headers in bytes."""
        line = self.parser.get_method() + b" " + self.url + b" HTTP/1.1\r\n"
        return len(line) + sum(len(name) + len(value) + 4 for name, value in self.headers) + 2

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.timer.on_request_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        scope: Any = cycle.scope
        self._chunks = scope["http_version"] != "1.0"
        self.write = self._write_chunks if self._chunks else self._write_unframed
        if self._settings.close_after_reply:
            cycle.keep_alive = False
        self.tasks.add(self.loop.create_task(self._run(cycle, app)))

    async def _run(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Call the application. It may return before its reply ends if it has called :meth:`listen`."""
        try:
            await app(cycle.scope, cycle.receive, cycle.send, self)
        except Exception:
            log.exception("the application failed")
            if cycle.response_started:
                self.transport.close()
            else:
                await cycle.send_500_response()
            return
        finally:
            self.tasks.discard(current_task())  # cheaper than a callback in another loop iteration
        if not (cycle.response_complete or cycle.disconnected or self._listener is not None):
            log.error("the application has not completed a reply")
            self.transport.close()

    def on_response_complete(self) -> None:
        """As in uvicorn, without its timer per connection: the server's sweep closes idle connections."""
        self.server_state.total_requests += 1
        self._listener = None
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
        else:
            self._active = None
            self.timer.on_last_reply(time.monotonic())

    # -- the sink of a streamed reply: see Sink

    @property
    def descriptor(self) -> int:
        return -1 if self.unread() or not self._chunks else self._descriptor

    def listen(self, listener: Listener, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self._reply_headers = headers
        if self.transport.is_closing():
            self._abandon()
            listener.on_disconnect()
            return
        self._listener = listener
        if self.flow.write_paused:  # the client has not read the previous reply
            listener.on_pause()

    def send(self, chunks: bytes, *, last: bool) -> None:
        assert self._active is not None
        if not self._chunks:
            chunks = unframed(chunks)
        elif last:
            chunks += LAST_CHUNK
        if not self._active.response_started:
            start = _EVENTS_HEAD + _lines(self._reply_headers)
            chunks = self._head_from(start, chunked=self._chunks) + chunks
        self.transport.write(chunks)
        if last:
            self._complete()

    def _write_unframed(self, chunks: bytes) -> None:
        self.transport.write(unframed(chunks))

    def begin(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Send the head of a reply; :meth:`write_body` and :meth:`finish` follow.

        Without a content-length in ``headers`` the body is chunked; for HTTP/1.0 it ends when the connection
        closes. Replies to HEAD and replies with status 204 or 304 have no body (RFC 9110 §6.4.1).
        """
        assert self._active is not None
        scope: Any = self._active.scope
        self._bodyless = scope["method"] == "HEAD" or status in (204, 304)
        sized = any(name == b"content-length" for name, _ in headers)
        self._framed = chunked = self._chunks and not sized and not self._bodyless
        first = b"HTTP/1.1 %d %b\r\n" % (status, responses.get(status, "").encode())
        dated = any(name == b"date" for name, _ in headers)
        self.transport.write(self._head_from(first + _lines(headers), chunked=chunked, dated=dated))

    def _head_from(self, start: bytes, *, chunked: bool, dated: bool = False) -> bytes:
        """A reply's head that begins with ``start``; ``dated``: ``start`` has a date header."""
        cycle = self._active
        assert cycle is not None
        cycle.response_started = True
        cycle.chunked_encoding = chunked
        cycle.waiting_for_100_continue = False
        date = b"" if dated else _lines(self.server_state.default_headers)
        framing = b"transfer-encoding: chunked\r\n" if chunked else b""
        close = b"" if cycle.keep_alive else _CLOSE
        return b"".join((start, date, framing, close, b"\r\n"))

    def write_body(self, data: bytes) -> None:
        """Write a non-empty part of the body; ignored on a closing connection."""
        if self.transport.is_closing():
            return
        if self._framed:
            self.transport.write(chunk(data))
        elif not self._bodyless:
            self.transport.write(data)

    def unread(self) -> int:
        return self.transport.get_write_buffer_size()

    def finish(self) -> None:
        """End the body of a reply that :meth:`begin` started."""
        assert self._active is not None
        if self._framed:
            self.transport.write(LAST_CHUNK)
        self._complete()

    def _complete(self) -> None:
        cycle = self._active
        assert cycle is not None
        self._listener = None
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()

    def cut(self) -> None:
        self._listener = None
        self._abandon()
        self.transport.abort()

    def _abandon(self) -> None:
        """Mark the reply in progress as disconnected; with pipelining it is not uvicorn's latest cycle."""
        if self._active is not None and not self._active.response_complete:
            self._active.disconnected = True
            self._active.message_event.set()
