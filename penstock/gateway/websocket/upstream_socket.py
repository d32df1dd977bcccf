"""A WebSocket to a model server, which carries the responses of one client one after the other."""

from __future__ import annotations

import asyncio
import select
import time
from typing import cast

from penstock.gateway.responses.held_bytes import HeldBytes
from penstock.gateway.upstream.connection_pool import ConnectionPool
from penstock.gateway.upstream.exchange import Failure, Headers, UpstreamRequest
from penstock.gateway.upstream.http1_connection import request_bytes
from penstock.gateway.websocket.socket_exchange import SocketExchange
from penstock.http.tls_problem import tls_problem
from penstock.http.websocket.codec import ENDED, GOING_AWAY, TOO_BIG, Closed, Codec, Ping, ProtocolFault, Text
from penstock.http.websocket.handshake import HandshakeRefused, check_accepted, new_key, opening

MAX_MESSAGE_BYTES = 16 << 20
"""As an event of a stream may have."""
MAX_HEAD_BYTES = 64 << 10
PING_S = 30.0
"""Seconds without a sign of the server after which it is pinged, and after as many it is gone."""
_TURNED_AWAY = frozenset({1000, 1001, 1012, 1013})
"""Close codes of a server that ends, or restarts: it has not begun what it has not answered."""


class NoWebSocketError(Exception):
    """The server has a connection, but no WebSocket. ``status``: of its answer; 0: it gave none."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class UpstreamSocket(asyncio.Protocol):
    """One connection. Closing it cancels what runs at the server."""

    def __init__(self, key: bytes, held: HeldBytes) -> None:
        self._key = key
        self._held = held
        self._holds = 0
        """Bytes of incomplete messages that are counted in ``held``."""
        self._transport: asyncio.Transport
        self._loop = asyncio.get_running_loop()
        self._codec = Codec(client=True, max_bytes=MAX_MESSAGE_BYTES)
        self._head = bytearray()
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._exchange: SocketExchange | None = None
        """The response that runs."""
        self._paused = False
        """Its client reads slowly."""
        self._waits_for_turn = False
        self._lost: str | None = None
        """Why the connection is lost; None: it is not."""
        self._heard_at = time.monotonic()
        self._pinged = False

    # -- opening

    async def open(self, request: bytes) -> None:
        """Send the opening handshake. Raises NoWebSocketError."""
        self._transport.write(request)
        await self._opened

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def _read_head(self, data: bytes) -> bytes:
        """Returns what follows the head of the answer; empty until then."""
        self._head += data
        head, end, rest = self._head.partition(b"\r\n\r\n")
        if not end:
            if len(self._head) > MAX_HEAD_BYTES:
                self._refuse(0, "its answer to the handshake is too large")
            return b""
        first, *lines = bytes(head).split(b"\r\n")
        status = first[9:12]
        pairs = [line.partition(b":") for line in lines]
        fields = {name.lower(): value.strip() for name, _, value in pairs}
        try:
            code = int(status) if first.startswith(b"HTTP/1.") and status.isdigit() else 0
            check_accepted(code, fields, self._key)
        except HandshakeRefused as error:
            self._refuse(code, str(error))
            return b""
        if not self._opened.done():
            self._opened.set_result(None)
        return bytes(rest)

    def _refuse(self, status: int, reason: str) -> None:
        if not self._opened.done():
            self._opened.set_exception(NoWebSocketError(status, reason))
        self._transport.abort()

    # -- what comes

    def data_received(self, data: bytes) -> None:
        self._heard_at, self._pinged = time.monotonic(), False
        if not self._opened.done():
            data = self._read_head(data)
            if not data:
                return
        if self._lost is not None:
            return
        self._codec.receive(data)
        if not (self._waits_for_turn or self._paused):
            self._process()

    def _process(self) -> None:
        """Process what has come, as far as one turn of the event loop allows."""
        try:
            for event in self._codec.events():
                match event:
                    case Text(data):
                        self._on_message(data)
                    case Ping(payload):
                        self._transport.write(self._codec.pong(payload))
                    case Closed(code, reason):
                        self._on_closed(code, reason)
        except ProtocolFault as fault:
            self._transport.write(self._codec.close(fault.code, fault.reason))
            self._lose(f"the model server has broken the protocol of WebSockets: {fault.reason}")
        if self._lost is not None:
            return
        holds = self._codec.held
        if not self._held.reserve_bytes(holds - self._holds):
            self._lose("replies of many requests are read at the same time")
            return
        self._holds = holds
        if self._codec.has_more:
            self._wait_for_turn()

    def _wait_for_turn(self) -> None:
        self._waits_for_turn = True
        self._transport.pause_reading()
        self._loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._waits_for_turn = False
        if self._lost is not None or self._paused:
            return
        self._process()
        if not (self._waits_for_turn or self._paused or self._transport.is_closing()):
            self._transport.resume_reading()

    def _on_message(self, data: bytes) -> None:
        if self._exchange is not None:  # else nobody has asked for it
            self._exchange.on_message(data)

    def _on_closed(self, code: int, reason: str) -> None:
        self._transport.write(self._codec.close(code))
        if code == TOO_BIG and self._exchange is not None:
            self._exchange.on_too_large(reason or "The message is too large for the model server.")
        failure = Failure.UNPROCESSED if code in _TURNED_AWAY else Failure.NETWORK
        self._lose(f"the model server has closed the WebSocket ({code} {reason}".rstrip() + ")", failure)

    def connection_lost(self, exc: Exception | None) -> None:
        reason = "the connection was closed"
        if exc is not None:
            reason = tls_problem(exc) or str(exc)
        if not self._opened.done():
            self._opened.set_exception(NoWebSocketError(0, reason))
        self._lose(reason)

    def _lose(self, reason: str, failure: Failure = Failure.NETWORK) -> None:
        """The connection carries nothing more."""
        if self._lost is not None:
            return
        self._lost = reason
        self._codec.stop()
        self._held.release_bytes(self._holds)
        self._holds = 0
        if not self._transport.is_closing():
            self._transport.close()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.on_lost(reason, failure)

    # -- called by the exchange

    def start(self, exchange: SocketExchange, message: bytes) -> bool:
        """Send what begins a response; False: the connection is lost."""
        if not self.is_free:
            return False
        self._exchange = exchange
        self._transport.write(self._codec.text(message))
        return True

    def ended(self, exchange: SocketExchange) -> None:
        """The response is complete."""
        if self._exchange is exchange:
            self._exchange = None
            self._resume()

    def drop(self, exchange: SocketExchange) -> None:
        """Nobody wants the rest of a response: the end of the connection tells the server."""
        if self._exchange is exchange:
            self._exchange = None
            self.close()

    def pause(self, exchange: SocketExchange) -> None:
        if self._exchange is exchange:
            self._paused = True
            if not self._transport.is_closing():
                self._transport.pause_reading()

    def resume(self, exchange: SocketExchange) -> None:
        if self._exchange is exchange:
            self._resume()

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            if not (self._waits_for_turn or self._transport.is_closing()):
                self._wait_for_turn()

    # -- called by its owner

    @property
    def usable(self) -> bool:
        return self._lost is None and not self._transport.is_closing()

    @property
    def is_free(self) -> bool:
        """Whether a response may begin."""
        return self.usable and self._exchange is None

    @property
    def is_silent(self) -> bool:
        """Whether nothing waits to be read, such as the end of the connection."""
        incoming = select.poll()
        incoming.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not incoming.poll(0)

    def tell(self, message: bytes) -> None:
        """Send a message to the response that runs, if there is one."""
        if self.usable and self._exchange is not None:
            self._transport.write(self._codec.text(message))

    def check(self) -> None:
        """Called every few seconds: a server that is gone without a word is noticed."""
        silent_s = time.monotonic() - self._heard_at
        if not self.usable or self._paused or silent_s < PING_S:
            return
        if self._pinged and silent_s >= 2 * PING_S:
            self._lose("the model server answers no ping")
            self._transport.abort()
        elif not self._pinged:
            self._pinged = True
            self._transport.write(self._codec.ping())

    def close(self, code: int = ENDED) -> None:
        if self.usable:
            self._transport.write(self._codec.close(code))
        self._lose("the connection was given up")
        if self._transport.get_write_buffer_size():
            self._transport.abort()


async def open_socket(
    pool: ConnectionPool, target: bytes, headers: Headers, held: HeldBytes
) -> UpstreamSocket:
    """A WebSocket to the server of ``pool``. Raises UpstreamError if it has no connection, NoWebSocketError
    if it has nothing but that."""
    key = new_key()
    socket = UpstreamSocket(key, held)
    await pool.dial(socket)
    request = UpstreamRequest(b"GET", target, [*headers, *opening(key)], b"")
    try:
        async with asyncio.timeout(pool.upstream.timeouts.connect):
            await socket.open(request_bytes(request, pool.authority, pool.upstream.form))
    except TimeoutError:
        socket.close(GOING_AWAY)
        raise NoWebSocketError(0, "it does not answer the handshake") from None
    except BaseException:
        socket.close(GOING_AWAY)
        raise
    return socket
