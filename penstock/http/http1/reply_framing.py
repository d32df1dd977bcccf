"""How replies of HTTP/1.1 are framed: heads, and bodies in chunks, by length, or to the connection's end."""

from __future__ import annotations

from enum import Enum, auto
from http.client import responses

from penstock.http.errors import ApiError
from penstock.http.http1.chunks import LAST_CHUNK, chunk
from penstock.http.sink import EVENT_STREAM, Headers, StreamKind

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_CLOSE = b"connection: close\r\n"
_KEEP_ALIVE = b"connection: keep-alive\r\n"
"""For HTTP/1.0, whose connections close otherwise (RFC 9112 §9.3)."""


def header_lines(headers: Headers) -> bytes:
    """Headers as they stand in a head."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])


_OK = b"HTTP/1.1 200 OK\r\n"
_EVENTS_HEAD = _OK + header_lines(EVENT_STREAM.headers)


def stream_head(kind: StreamKind) -> bytes:
    """How the head of a stream begins."""
    return _EVENTS_HEAD if kind is EVENT_STREAM else _OK + header_lines(kind.headers)


class Framing(Enum):
    """How the end of a body is told."""

    CHUNKED = auto()
    SIZED = auto()
    """The body's end is known by a content-length."""
    UNTIL_CLOSE = auto()
    """The connection ends with it: for HTTP/1.0."""
    NO_BODY = auto()
    """Replies to HEAD and replies with status 204 or 304 (RFC 9110 §6.4.1)."""


class ReplyFraming:
    """The framing of a connection's replies, one after the other. Makes bytes, and writes none."""

    __slots__ = ("body", "chunks")

    def __init__(self) -> None:
        self.chunks = True
        """Whether the client of the request in progress supports chunks (HTTP/1.1)."""
        self.body = Framing.SIZED
        """The framing of the body of the reply that began last."""

    def on_request(self, version: str) -> None:
        """A request begins, whose client speaks ``version``."""
        self.chunks = version != "1.0"

    # -- heads

    def begin_events(self) -> None:
        """The reply becomes a stream of events."""
        self.body = Framing.CHUNKED if self.chunks else Framing.UNTIL_CLOSE

    def begin(self, method: str, status: int, headers: Headers) -> bytes:
        """The reply gets this status and these headers, which tell its length or leave it open. Returns how
        its head begins."""
        if method == "HEAD" or status in (204, 304):
            self.body = Framing.NO_BODY
        elif b"content-length" in [name for name, _ in headers]:
            self.body = Framing.SIZED
        else:
            self.begin_events()
        start = _OK if status == 200 else b"HTTP/1.1 %d %b\r\n" % (status, responses.get(status, "").encode())
        return start + header_lines(headers)

    def head(self, start: bytes, date: bytes, *, keep_alive: bool) -> bytes:
        """The whole head. ``date``: a line, or empty; ``keep_alive``: the connection goes on."""
        framing = b"transfer-encoding: chunked\r\n" if self.body is Framing.CHUNKED else b""
        if keep_alive:
            connection = b"" if self.chunks else _KEEP_ALIVE
        else:
            connection = _CLOSE
        return b"".join((start, date, framing, connection, b"\r\n"))

    # -- bodies

    def events(self, data: bytes, *, last: bool) -> bytes:
        """Events of a stream, possibly none; ``last``: with its end."""
        if not self.chunks:
            return data
        return (chunk(data) if data else b"") + (LAST_CHUNK if last else b"")

    def part(self, data: bytes) -> bytes:
        """A part of a body, as it is sent; empty if the reply has no body."""
        if self.body is Framing.CHUNKED:
            return chunk(data) if data else b""
        return b"" if self.body is Framing.NO_BODY else data

    def end(self) -> bytes:
        """What ends the body."""
        return LAST_CHUNK if self.body is Framing.CHUNKED else b""


def local_reply(error: ApiError, date: bytes) -> bytes:
    """A whole reply to what no application has answered, after which the connection closes."""
    body = error.body()
    return b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b%b\r\n%b" % (
        error.status,
        responses[error.status].encode(),
        len(body),
        header_lines([(b"date", date), *error.headers]),
        _CLOSE,
        body,
    )
