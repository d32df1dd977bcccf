"""The way to a client's connection.

A streamed reply writes complete chunks of HTTP/1.1's chunked encoding to a sink. Under our uvicorn
protocol (:mod:`penstock.http.http1`) that is the connection's transport itself, and a write is one call;
under any other ASGI server it is :class:`AsgiSink`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

EXTENSION = "penstock.sink"
"""Key in the ASGI scope's extensions under which a server offers a Sink of its own."""

REPLY_HEADERS = "penstock.headers"
"""Key in the ASGI scope under which the application leaves headers for a Sink of the server's own to send."""


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


EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx and its kind must not collect events
]


HIGH_WATER_BYTES = 16 * 1024
"""Written and not yet taken by the server: from here on the client counts as one that does not read."""


def unframed(chunks: bytes) -> bytes:
    """The contents of complete chunks."""
    contents = []
    while chunks:
        header, _, rest = chunks.partition(b"\r\n")
        size = int(header, 16)
        contents.append(rest[:size])
        chunks = rest[size + 2 :]
    return b"".join(contents)


class AsgiSink:
    """A sink over plain ASGI: chunks wait in a buffer that :meth:`run` sends."""

    descriptor = -1

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._buffer = bytearray()
        self._sending = 0
        """Bytes that the server is about to take."""
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._listener: Listener | None = None
        self._started = self._finished = self._gone = self._paused = False

    def listen(self, listener: Listener) -> None:
        self._listener = listener

    def write(self, chunks: bytes) -> None:
        self._buffer += unframed(chunks)  # an ASGI server makes its own chunks
        self._changed.set()
        if not self._paused and self._listener is not None and self.unread() > HIGH_WATER_BYTES:
            self._paused = True
            self._listener.on_pause()

    def send(self, chunks: bytes, *, last: bool) -> None:
        self._started = True
        self._finished = last
        self.write(chunks)

    def unread(self) -> int:
        return self._sending + len(self._buffer)

    def cut(self) -> None:
        self._gone = True
        self._changed.set()
        if self._sending and self._task is not None:
            self._task.cancel()  # it waits for a client that does not read

    def cut_unless_finished(self) -> None:
        if not self._finished:
            self.cut()

    async def run(self) -> None:
        """Sends until the reply is finished or the client has gone; returns at once if it never starts."""
        self._task = asyncio.current_task()
        watcher = asyncio.ensure_future(self._watch())
        try:
            await self._changed.wait()
            if self._started:
                await self._send(
                    {"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS}
                )
            while self._started and not self._gone and not await self._send_buffer():
                await self._changed.wait()
        except asyncio.CancelledError:
            if not self._gone:
                raise
        finally:
            watcher.cancel()

    async def _send_buffer(self) -> bool:
        """Whether that was the last of the body."""
        self._changed.clear()
        body, finished = bytes(self._buffer), self._finished
        self._buffer.clear()
        self._sending = len(body)
        await self._send({"type": "http.response.body", "body": body, "more_body": not finished})
        self._sending = 0
        if self._paused and self._listener is not None:
            self._paused = False
            self._listener.on_resume()
        return finished

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._finished and self._listener is not None:
            self._listener.on_disconnect()
        self.cut()
