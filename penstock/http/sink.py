"""The interface through which a reply writes to its client, and the ASGI types.

An HTTP/1.1 connection (:mod:`penstock.http.http1.connection`) implements it itself, so a write is one call;
of an HTTP/2 connection, each stream does. Replies give content; framing is the implementation's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, MutableMapping, Sequence
from typing import Any, Protocol

from penstock.http.row_path import RowPath

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies such as nginx must not buffer events
]
"""Headers of a reply that is sent by :meth:`Sink.send`."""


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
    def row_path(self) -> RowPath | None:
        """How rows may now be written without :meth:`write`; None: not at all, because bytes wait for the
        client, or because the connection does not allow it (HTTP/1.1 with TLS, HTTP/1.0)."""
        ...

    def listen(self, listener: Listener, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """Set the reply's listener, once per reply. ``headers`` are added to those that ``send`` writes."""
        ...

    def release(self) -> None:
        """The application has no use for the request's body any more; its bytes are not counted from here."""
        ...

    def unread(self) -> int:
        """Bytes of the reply that wait: the operating system or the client's window has no room for them."""
        ...

    def cut(self) -> None:
        """Break the reply off: the client sees a truncated body."""
        ...

    # -- a stream of events

    def send(self, data: bytes, *, last: bool) -> None:
        """Write events. The first call writes status 200 and the headers of an event stream before them;
        ``last`` ends the reply, and the connection serves its next request."""
        ...

    def write(self, data: bytes) -> None:
        """Write events, after the first :meth:`send`; never blocks."""
        ...


class Sink(EventSink, Protocol):
    """The connection of one reply, which may be of another kind."""

    def begin(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Send the head of a reply; :meth:`write_body` and :meth:`finish` follow."""
        ...

    def write_body(self, data: bytes) -> None:
        """Write a non-empty part of the body; ignored when the client has gone."""
        ...

    def finish(self) -> None:
        """End the body."""
        ...


Application = Callable[[Scope, Receive, Send, Sink], Coroutine[Any, Any, None]]
"""Called for each request, with the ASGI arguments and the sink of the reply. It runs without a task until it
first waits (:mod:`penstock.http.eager`)."""
