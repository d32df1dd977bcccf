"""A client's connection, as a streamed reply writes to it.

The reply writes complete chunks of HTTP/1.1's chunked encoding. The connection itself
(:mod:`penstock.http.http1`) is the sink, and a write is one call.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol, TypeAlias

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Handler: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
"""Answers the requests of one route."""

EXTENSION = "penstock.sink"
"""Key in the ASGI scope's extensions under which the server offers its Sink."""

REPLY_HEADERS = "penstock.headers"
"""Key in the ASGI scope under which the application leaves headers for the Sink to send."""


class Listener(Protocol):
    """Told of the connection's life while a reply is in progress."""

    def on_disconnect(self) -> None: ...

    def on_pause(self) -> None:
        """The client does not read as fast as it is written to."""
        ...

    def on_resume(self) -> None: ...


class Sink(Protocol):
    """One reply's connection."""

    @property
    def write(self) -> Callable[[bytes], object]:
        """Takes one or more complete chunks, after ``send`` was called; never blocks."""
        ...

    @property
    def descriptor(self) -> int:
        """Of the non-blocking socket that chunks may go to past ``write``, since nothing waits here that was
        written before; -1: none."""
        ...

    def listen(self, listener: Listener) -> None:
        """Names who is told of disconnects; at most one listener per reply."""
        ...

    def send(self, chunks: bytes, *, last: bool) -> None:
        """As ``write``, the first time after status 200 and the headers of an event stream; ``last``: and
        before the end of the body, after which the connection serves its next request."""
        ...

    def unread(self) -> int:
        """Bytes that were written and that the operating system has not taken."""
        ...

    def cut(self) -> None:
        """Breaks the connection: the client sees a truncated body, never a complete one."""
        ...
