"""Clients that read slower than the server writes, or not at all."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Protocol, Self

from penstock.bench.errors import BenchError
from penstock.bench.load.http1 import request_bytes
from penstock.bench.load.http2 import Http2LoadConnection, Http2Requests
from penstock.bench.load.latency import ReadLog
from penstock.bench.load.messages import LoadPlan
from penstock.bench.load.tls import TlsSession, client_context
from penstock.http.http2.frames import MAX_WINDOW

WINDOW_BYTES = 4096
"""Receive buffer of a connection that is read slowly: small, so that unread data stays at the server."""
READ_BYTES = 256
TURN_S = 0.1
"""Time between two reads of READ_BYTES on a connection of HTTP/1.1: about one of sixteen events at 15 ms per
token. Over HTTP/2 a stream gets a window of 1 byte in the same time."""
CONNECT_SECONDS = 10.0


class SlowReader(Protocol):
    """One connection."""

    def turn(self) -> int:
        """Do what it does every TURN_S. Returns the number of streams that the server has cut since."""

    def close(self) -> None:
        """Close the connection."""


class SlowReaders:
    """Streams that are read slowly, by a thread. Use it as a context, which closes their connections.

    Over HTTP/1.1 each has a connection. Over HTTP/2 they share two: one that is not read, and one whose
    streams have windows of 1 byte; the first has half of them, rounded up.
    """

    def __init__(self, plan: LoadPlan, body: str, count: int) -> None:
        """Send ``body`` on ``count`` streams to the server of ``plan``. Raises BenchError."""
        self.cut = 0
        """Streams that the server cut."""
        self._done = threading.Event()
        self._readers: list[SlowReader] = []
        self._thread = threading.Thread(target=self._read_on, name="slow-readers", daemon=True)
        try:
            for connect in _readers(plan, body.encode(), count):
                self._readers.append(connect())
        except OSError as error:
            self._close()
            raise BenchError(f"slow readers cannot connect: {error}") from None
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._close()

    def _close(self) -> None:
        for reader in self._readers:
            reader.close()

    def _read_on(self) -> None:
        while not self._done.wait(TURN_S):
            self.cut += sum(reader.turn() for reader in self._readers)


def _readers(plan: LoadPlan, body: bytes, count: int) -> Iterator[Callable[[], SlowReader]]:
    """What connects each reader."""
    if not plan.http2:
        for _ in range(count):
            yield lambda: OneStream(plan, body)
        return
    unread = -(-count // 2)
    yield lambda: UnreadConnection(plan, body, unread)
    if count > unread:
        yield lambda: NarrowWindows(plan, body, count - unread)


class _Socket:
    """A connected socket of either protocol, with TLS if the plan wants it."""

    def __init__(self, plan: LoadPlan, receive_bytes: int | None) -> None:
        self.socket = socket.socket(socket.AF_INET6 if ":" in plan.host else socket.AF_INET)
        self._unsent = b""
        try:
            if receive_bytes is not None:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            self.socket.settimeout(CONNECT_SECONDS)
            self.socket.connect((plan.host, plan.port))
            self._tls = None
            if plan.authority is not None:
                context = client_context(plan.authority, plan.alpn)
                self._tls = TlsSession(context, self.socket, plan.host)
        except BaseException:
            self.socket.close()
            raise

    def send(self, data: bytes) -> None:
        """Send ``data``, after all that the kernel has not taken yet."""
        self._unsent += self._tls.seal(data) if self._tls else data
        try:
            while self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except ConnectionError:
            self._unsent = b""  # the next read tells

    def read(self, size: int) -> bytes | None:
        """Up to ``size`` bytes; empty once the connection is closed, None if there is nothing to read."""
        buffer = bytearray(size)
        try:
            received = self._tls.recv_into(buffer) if self._tls else self.socket.recv_into(buffer)
        except BlockingIOError:
            return None
        except ConnectionError:
            return b""
        return bytes(buffer[:received])


class OneStream:
    """A connection of HTTP/1.1 with one stream, of which little is read."""

    def __init__(self, plan: LoadPlan, body: bytes) -> None:
        self._socket = _Socket(plan, WINDOW_BYTES)
        self._socket.send(request_bytes(plan, body))
        self._socket.socket.setblocking(False)
        self._open = True

    def turn(self) -> int:
        if self._open and self._socket.read(READ_BYTES) == b"":
            self._open = False
            return 1
        return 0

    def close(self) -> None:
        self._socket.socket.close()


class _Http2Streams:
    """A connection of HTTP/2 with streams whose requests the server has taken."""

    def __init__(
        self, plan: LoadPlan, body: bytes, streams: int, receive_bytes: int | None, window: int
    ) -> None:
        self.socket = _Socket(plan, receive_bytes)
        self.state = Http2LoadConnection(Http2Requests(plan, [body]), streams, window)
        self._log = ReadLog()
        try:
            self._start(streams)
        except BaseException:
            self.socket.socket.close()
            raise
        self.socket.socket.setblocking(False)

    def _start(self, streams: int) -> None:
        state = self.state
        self._flush()
        while not state.ready:
            self._read()
        for request in range(streams):
            state.start(request)
        self._flush()
        while state.unsent and state.failure is None:
            self._read()
        if state.failure is not None:
            raise ConnectionError(state.failure)

    def _read(self) -> None:
        data = self.socket.read(65536)
        if data == b"":
            raise ConnectionError("the server closed the connection")
        self.feed(data or b"")

    def feed(self, data: bytes) -> int:
        """Take what was read and answer it. Returns the streams that ended."""
        ended = self.state.feed(data, self._log)
        self._log = ReadLog()
        self._flush()
        return len(ended)

    def _flush(self) -> None:
        if output := self.state.take_output():
            self.socket.send(output)

    def close(self) -> None:
        self.socket.socket.close()


class UnreadConnection:
    """A connection of HTTP/2 whose streams have large windows, but which is not read."""

    def __init__(self, plan: LoadPlan, body: bytes, streams: int) -> None:
        self._streams = _Http2Streams(plan, body, streams, WINDOW_BYTES, MAX_WINDOW)
        self._count = streams
        self._poller = select.poll()
        # Unread data hides the end of a connection from POLLIN.
        self._poller.register(self._streams.socket.socket, getattr(select, "POLLRDHUP", 0))

    def turn(self) -> int:
        if self._count and self._poller.poll(0):
            count, self._count = self._count, 0
            return count
        return 0

    def close(self) -> None:
        self._streams.close()


class NarrowWindows:
    """A connection of HTTP/2 that is read, but whose streams get a window of 1 byte at a time."""

    def __init__(self, plan: LoadPlan, body: bytes, streams: int) -> None:
        self._streams = _Http2Streams(plan, body, streams, None, 1)

    def turn(self) -> int:
        state = self._streams.state
        if state.failure is not None:
            return 0
        ended = 0
        while (data := self._streams.socket.read(65536)) is not None:
            if not data:
                return ended + len(state.close())
            ended += self._streams.feed(data)
        for stream in state.streams:
            state.grant(stream, 1)
        ended += self._streams.feed(b"")
        return ended

    def close(self) -> None:
        self._streams.close()
