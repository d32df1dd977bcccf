"""The interface through which a streamed reply writes to its client's connection, and the ASGI types.

The reply writes complete chunks of HTTP/1.1's chunked encoding. The connection itself
(:mod:`penstock.http.http1`) implements it, so a write is one call.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Protocol

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Listener(Protocol):
    """Notified of connection events while its reply is in progress."""

    def on_disconnect(self) -> None: ...

    def on_pause(self) -> None:
        """The write buffer is full: the client reads too slowly."""
        ...

    def on_resume(self) -> None: ...


class Sink(Protocol):
    """The connection of one reply."""

    @property
    def write(self) -> Callable[[bytes], object]:
        """Writes one or more complete chunks, after the first ``send``; never blocks."""
        ...

    @property
    def descriptor(self) -> int:
        """Descriptor of the non-blocking socket, for writes that bypass ``write``; -1 if bytes wait in the
        write buffer, or if the connection cannot be bypassed (TLS, HTTP/1.0)."""
        ...

    def listen(self, listener: Listener, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """Set the reply's listener, once per reply. ``headers`` are added to those that ``send`` writes."""
        ...

    def send(self, chunks: bytes, *, last: bool) -> None:
        """Write chunks. The first call writes status 200 and the headers of an event stream before them;
        ``last`` ends the body, and the connection serves its next request."""
        ...

    def release(self) -> None:
        """The application has no use for the request's body any more; its bytes are not counted from here."""
        ...

    def unread(self) -> int:
        """Bytes in the write buffer, which the operating system has not taken."""
        ...

    def cut(self) -> None:
        """Abort the connection: the client sees a truncated body."""
        ...
