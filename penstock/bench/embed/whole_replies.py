"""A load of requests whose replies are read whole: one at a time on each of some connections."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
import numpy as np

from penstock.bench.errors import BenchError
from penstock.bench.load.latency import Latency
from penstock.http.http1.reply_reader import ReplyFault, ReplyReader

DEFAULT_PORT = 80
READ_BYTES = 1 << 18
CONNECT_SECONDS = 10.0
SHOWN = 300


class WholeReply(NamedTuple):
    """The last reply of a connection."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


class RoundOfReplies(msgspec.Struct, frozen=True):
    """What a round has brought; no reply had another status than 200."""

    requests: int
    body_bytes: int
    wall_s: float
    latency_ms: Latency
    beside: int
    """Replies to the request beside."""


class _Connection:
    """One request at a time."""

    def __init__(self, place: tuple[str, int]) -> None:
        self.socket = socket.create_connection(place, CONNECT_SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.reader = ReplyReader(self._on_head)
        self.began = 0.0
        self._status, self._headers = 0, dict[bytes, bytes]()
        self._body: list[bytes] = []

    def _on_head(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self._status, self._headers = status, dict(headers)

    def start(self, request: bytes) -> None:
        self._body.clear()
        self.reader.begin(bodyless=False)
        self.began = time.perf_counter()
        self.socket.sendall(request)

    def read(self) -> WholeReply | None:
        """More of the reply, which is returned once it is whole. Raises BenchError."""
        try:
            data = self.socket.recv(READ_BYTES)
            if not data:
                raise BenchError("the server closed a connection instead of replying")
            self._body.append(self.reader.feed(data))
        except (OSError, ReplyFault) as error:
            raise BenchError(f"a reply did not come: {error}") from None
        if not self.reader.complete:
            return None
        reply = WholeReply(self._status, self._headers, b"".join(self._body))
        if reply.status != 200:
            shown = reply.body[:SHOWN].decode(errors="replace")
            raise BenchError(f"a request was answered with {reply.status}: {shown}")
        return reply


class WholeReplies:
    """Connections to a server; use it as a context."""

    def __init__(self, url: str, connections: int) -> None:
        """Raises BenchError if the server at ``url`` is not there."""
        parts = urlsplit(url)
        place = parts.hostname or "", parts.port or DEFAULT_PORT
        self._host = f"{place[0]}:{place[1]}"
        self._selector = selectors.DefaultSelector()
        self._stack = contextlib.ExitStack()
        self._stack.callback(self._selector.close)
        try:
            self._connections = [_Connection(place) for _ in range(connections)]
        except OSError as error:
            raise BenchError(f"cannot connect to {url}: {error}") from None
        for each in self._connections:
            self._stack.callback(each.socket.close)
            self._selector.register(each.socket, selectors.EVENT_READ, each)

    def __enter__(self) -> WholeReplies:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def get(self, path: str) -> bytes:
        """A whole request."""
        return f"GET {path} HTTP/1.1\r\nHost: {self._host}\r\n\r\n".encode()

    def post(self, path: str, body: bytes) -> bytes:
        """A whole request with JSON."""
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def one(self, request: bytes, seconds: float) -> WholeReply:
        """The reply to one request. Raises BenchError."""
        connection = self._connections[0]
        connection.socket.settimeout(seconds)
        connection.start(request)
        while (reply := connection.read()) is None:
            pass
        return reply

    def run(
        self,
        requests: Sequence[bytes],
        count: int,
        seconds: float,
        *,
        rate: float | None = None,
        beside: bytes | None = None,
    ) -> RoundOfReplies:
        """Send ``count`` requests, those of ``requests`` in turn. Raises BenchError.

        ``rate``: so many per second, whose latencies begin when they are due; otherwise one after the other
        on each connection. ``beside``: a request that one of the connections sends again and again.
        """
        times, size, started, answered = array("d"), 0, 0, 0
        idle = deque(self._connections)
        other = None if beside is None else idle.popleft()
        begin = now = time.perf_counter()
        if other is not None and beside is not None:
            other.start(beside)
        while len(times) < count:
            due = begin if rate is None else begin + started / rate
            while started < count and idle and due <= now:
                connection = idle.popleft()
                connection.start(requests[started % len(requests)])
                if rate is not None:
                    connection.began = due
                started += 1
                due = begin if rate is None else begin + started / rate
            waits = due - now if started < count and idle else seconds
            for key, _ in self._selector.select(max(0.0, min(waits, seconds))):
                connection = key.data
                reply = connection.read()
                if reply is None:
                    continue
                if connection is other:
                    answered += 1
                    connection.start(beside or b"")
                    continue
                times.append(time.perf_counter() - connection.began)
                size += len(reply.body)
                idle.append(connection)
            now = time.perf_counter()
            if now > begin + seconds:
                raise BenchError(f"{len(times)} of {count} replies came within {seconds:.0f} s")
        while other is not None and other.read() is None:
            pass
        latency = Latency.of(np.frombuffer(times, np.float64))
        return RoundOfReplies(count, size, now - begin, latency, answered)
