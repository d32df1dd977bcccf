"""What all connections of one HTTP server share: limits, callbacks, and the sets of what is open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any, Protocol

from penstock.http.errors import ApiError
from penstock.http.http1.chunked_body import ChunkRounds
from penstock.http.http2.flow_windows import FlowWindows
from penstock.http.receive_budget import Holder, ReceiveBudget

LINGER_S = 5.0
"""Time for which a closing connection reads and discards what its client still sends: closing with unread
bytes resets the connection, which can destroy the reply (RFC 9112 §9.6)."""
REFUSAL_S = 1.0
"""Time for which a connection beyond the limit is listened to, to be refused in its protocol."""
MAX_LINGER_BYTES = 64 * 1024 * 1024
"""Bytes that it discards."""


def address(info: Any) -> tuple[str, int] | None:
    """Host and port; None for a Unix socket, and for a client that has gone already."""
    return (str(info[0]), int(info[1])) if isinstance(info, tuple) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits per server and per connection."""

    header_timeout_s: float = 30.0
    """Maximum duration of a TLS handshake, of receiving the head of a request, and of a pause in its body."""
    keep_alive_timeout_s: float = 75.0
    """Idle time after which a connection is closed."""
    max_connections: int = 65536
    max_header_bytes: int = 65536
    """Maximum size of the request line and headers."""
    max_backlog: int = 4 * 1024 * 1024
    """Maximum number of reply bytes that wait for one client."""
    max_lingering: int = 1024
    """Maximum number of connections that close and still read what their clients send, and of those beyond
    ``max_connections`` that are told so in their protocol."""
    max_held_bytes: int = 320 * 1024 * 1024
    """Maximum number of bytes of requests that all connections hold together."""


class ServedConnection(Protocol):
    """A client's connection, of HTTP/1.1 or HTTP/2, as its server sees it."""

    @property
    def bytes_queued(self) -> int:
        """Reply bytes that wait for the client."""

    @property
    def is_over(self) -> bool:
        """Whether it only waits for its client to close: nothing is left to serve or to write."""

    def shutdown(self) -> None:
        """Close now if idle, else after the replies in progress."""

    def cut_if_slow(self, now: float, request_timeout_s: float, keep_alive_s: float) -> None:
        """Close or abort the connection if its client is too slow; called once a second."""


@dataclass(slots=True, kw_only=True)
class ServerState:
    """One object per server; each of its connections keeps a reference."""

    limits: Limits = field(default_factory=Limits)
    clock: Callable[[], float] = time.monotonic
    """Seconds of any monotonic clock."""
    on_refusal: Callable[[ApiError], None] = lambda error: None
    """Called for each request that is answered without the application."""
    on_lost: Callable[[], None] = lambda: None
    """Called for each connection that closes."""
    is_full: Callable[[], bool] = lambda: False
    """Whether other connections wait for want of descriptors."""
    ending: bool = False
    """True once the process is about to end."""
    connections: set[ServedConnection] = field(default_factory=set)
    http2_streams: int = 0
    """Open streams of all HTTP/2 connections, at most as many as connections may be."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """Applications that wait for something."""
    budget: ReceiveBudget = field(init=False)
    """Budget of the bytes of requests that the connections hold."""
    chunk_rounds: ChunkRounds = field(default_factory=ChunkRounds)
    lingering: set[Holder] = field(default_factory=set)
    """Connections that only wait for their client to close."""
    windows: FlowWindows = field(default_factory=FlowWindows)
    """Flow windows of the server's HTTP/2 connections and their streams."""
    date: bytes = b""
    """Value of the Date header of replies."""

    def __post_init__(self) -> None:
        self.budget = ReceiveBudget(self.limits.max_held_bytes)
        self.update_date()

    @property
    def closes_after_reply(self) -> bool:
        """Whether every reply is the last one of its connection."""
        return self.ending or self.is_full()

    @property
    def excess_connections(self) -> int:
        """Connections beyond the limit."""
        return max(0, len(self.connections) - self.limits.max_connections)

    def update_date(self) -> None:
        """To be called once a second."""
        self.date = formatdate(time.time(), usegmt=True).encode()
