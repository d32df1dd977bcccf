"""The interface through which a reply writes to its client.

An HTTP/1.1 connection (:mod:`penstock.http.http1.connection`) implements it itself, so a write is one call;
of an HTTP/2 connection, each stream does. Replies give content; framing is the implementation's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.http.write_target import WriteTarget

if TYPE_CHECKING:
    from penstock.http.websocket.channel import Channel, ChannelUser

Headers = Sequence[tuple[bytes, bytes]]


class StreamKind(NamedTuple):
    """What the streams of one content type have in common."""

    headers: Headers
    filler: bytes
    """Bytes that may stand between two events, and that clients ignore."""

    @property
    def content_type(self) -> str:
        return next(value.decode() for name, value in self.headers if name == b"content-type")


def _unbuffered(content_type: bytes) -> Headers:
    """Headers of what proxies such as nginx must not buffer."""
    return [(b"content-type", content_type), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


EVENT_STREAM = StreamKind(_unbuffered(b"text/event-stream; charset=utf-8"), filler=b":\n\n")
"""Server-sent events."""
LINES = StreamKind(_unbuffered(b"application/x-ndjson"), filler=b" ")
"""JSON, a line each. White space may precede it, but an empty line would be no JSON."""
ARRAY = StreamKind(_unbuffered(b"application/json"), filler=b" ")
"""One JSON array, whose items come one after the other."""


class Listener(Protocol):
    """Notified of connection events while its reply is in progress."""

    def on_disconnect(self) -> None: ...

    def on_pause(self) -> None:
        """The write buffer is full: the client reads too slowly."""
        ...

    def on_resume(self) -> None: ...


class EventSink(Protocol):
    """Where a reply's events go, for as long as the reply is in progress."""

    @property
    def write_target(self) -> WriteTarget | None:
        """How rows may now be written without :meth:`write`; None: not at all, because bytes wait for the
        client, or because the connection does not allow it (HTTP/1.1 with TLS, HTTP/1.0)."""
        ...

    def listen(self, listener: Listener) -> None:
        """Set the reply's listener, once per reply."""
        ...

    def release(self, kept: int = 0) -> None:
        """The application has no use for what it has read of the request's body, but for ``kept`` bytes: no
        more are counted from here."""
        ...

    def unread(self) -> int:
        """Bytes of the reply that wait: the operating system or the client's window has no room for them."""
        ...

    def cut(self) -> None:
        """Break the reply off: the client sees a truncated body."""
        ...

    # -- a stream of events

    def send(self, data: bytes, *, last: bool, kind: StreamKind = EVENT_STREAM) -> None:
        """Write events. The first call writes status 200 and the headers of the ``kind`` before them;
        ``last`` ends the reply, and the connection serves its next request."""
        ...

    def write(self, data: bytes) -> None:
        """Write events, after the first :meth:`send`; never blocks."""
        ...


class ReplySink(Protocol):
    """Where a reply goes that was made elsewhere."""

    @property
    def write_target(self) -> WriteTarget | None: ...

    def listen(self, listener: Listener) -> None: ...

    def begin(self, status: int, headers: Headers) -> None:
        """Begin a reply; its head may be sent with what follows: :meth:`write_body`, :meth:`finish`."""
        ...

    def write_body(self, data: bytes) -> None:
        """Write a non-empty part of the body; ignored when the client has gone."""
        ...

    def finish(self) -> None:
        """End the body."""
        ...

    def cut(self) -> None: ...


class Sink(EventSink, ReplySink, Protocol):
    """The connection of one reply, which may be of another kind."""

    @property
    def write_paused(self) -> bool:
        """Whether the client reads too slowly to be sent more."""
        ...

    def on_body_wanted(self) -> None:
        """The application waits for more of the request's body."""
        ...

    def reply(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole reply; its ``body`` may be empty."""
        ...

    def upgrade(self, headers: Headers, use: Callable[[Channel], ChannelUser]) -> None:
        """Accept the request as a WebSocket; ``headers``: of the reply. Complete without a further call."""
        ...
