"""How a connection ends: drained with GOAWAY, or at once by a fault; and how long its client has to close."""

from __future__ import annotations

import logging
import math
from asyncio import get_running_loop
from typing import TYPE_CHECKING

from penstock.http.http2 import frames
from penstock.http.http2.faults import ErrorCode
from penstock.http.server_state import LINGER_S, MAX_LINGER_BYTES

if TYPE_CHECKING:
    from penstock.http.http2.connection import Http2Connection

log = logging.getLogger(__name__)

GOAWAY_DELAY_S = 1.0
"""Maximum time between the two GOAWAY frames of a connection that ends (RFC 9113 §6.8)."""
IDLE_S = 1.0
"""A client that has asked for nothing for this long, or longer, has read the replies before, and a new one
has nothing to ask."""
PING = b"penstock"
"""Of the PING behind the first GOAWAY: when it is answered, no request is on its way."""


class Ending:
    """The end of one connection, from the first thought of it. It drains (:meth:`drain`, :meth:`go`), with
    its last stream it lingers, until its client has closed."""

    __slots__ = ("_connection", "_discarded", "_draining", "_last_served", "_lingers_since")

    def __init__(self, connection: Http2Connection) -> None:
        self._connection = connection
        self._draining = False
        """Whether the first GOAWAY is sent."""
        self._last_served: int | None = None
        """The last stream id that is served, which the second GOAWAY has said."""
        self._lingers_since: float | None = None
        """Since when nothing is left to do but to discard what comes; None while there is."""
        self._discarded = 0

    @property
    def lingers(self) -> bool:
        return self._lingers_since is not None

    def is_unserved(self, stream_id: int) -> bool:
        """Whether the client was told that the stream is not served."""
        return self._last_served is not None and stream_id > self._last_served

    def on_server_ends(self) -> None:
        """Drain once the first request is answered, or does not come: the server tells new clients why it
        does not serve them."""
        if self._connection.last_id or not self._was_busy:
            self.drain()

    @property
    def _was_busy(self) -> bool:
        """Whether the connection is new, or had a stream a moment ago."""
        return self._connection.state.clock() - self._connection.idle_since < IDLE_S

    def drain(self) -> None:
        """Close after the replies in progress, and those of requests on their way."""
        if self._draining or self.lingers:
            return
        self._draining = True
        if not self._connection.streams and self._was_busy:
            self.go()  # it lingers
            return
        self._connection.sender.write(
            frames.goaway(frames.STREAM_BITS, ErrorCode.NO_ERROR) + frames.ping(PING)
        )
        get_running_loop().call_later(GOAWAY_DELAY_S, self.go)

    def on_ping_ack(self, payload: bytes) -> None:
        if self._draining and payload == PING:
            self.go()

    def go(self) -> None:
        """The client knows that the connection ends: serve what has come, and nothing after it."""
        if self._last_served is not None or self.lingers:
            return
        connection = self._connection
        self._last_served = connection.last_id
        connection.sender.write(frames.goaway(connection.last_id, ErrorCode.NO_ERROR))
        if connection.streams:
            return
        if self._was_busy:
            self._linger()
        else:
            connection.sender.flush()
            connection.transport.close()

    def on_last_stream(self) -> None:
        """No stream is left."""
        if self._last_served is not None and not self.lingers:
            self._linger()

    def fail(self, code: ErrorCode, reason: str) -> None:
        """The client broke the protocol, or takes too much: end all its streams."""
        if self.lingers:
            return
        log.debug("connection ended: %s: %s", code.name, reason)
        self._connection.sender.write(frames.goaway(self._connection.last_id, code, reason))
        self._linger(faulty=True)

    def _linger(self, *, faulty: bool = False) -> None:
        """Close once the client has closed, or is too late (:data:`LINGER_S`): closing with unread bytes
        would destroy what it has not read. With TLS, which has no end of one direction, it may have read all
        replies and wait for us; a ``faulty`` one is not waited for."""
        connection = self._connection
        self._lingers_since = connection.now
        connection.sender.flush()
        connection.end_all()
        lingering, transport = connection.state.lingering, connection.transport
        half = transport.can_write_eof()
        if transport.is_closing():
            return
        if len(lingering) < connection.state.limits.max_lingering and (half or not faulty):
            lingering.add(connection)
            if half:
                transport.write_eof()
        else:
            transport.close()

    def discard(self, size: int) -> None:
        """More has come from a client that has not closed."""
        self._discarded += size
        if self._discarded > MAX_LINGER_BYTES:
            self._connection.transport.abort()

    def check(self, now: float) -> None:
        """Called once a second while the connection lingers."""
        if self._lingers_since is not None and now - self._lingers_since > LINGER_S:
            self._connection.transport.abort()

    def forget(self) -> None:
        """The connection is lost, and its streams are closed: nothing is done any more, also by timers."""
        self._lingers_since = math.inf
        del self._connection  # breaks a reference cycle
