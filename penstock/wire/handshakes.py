"""Bounds the connections over tcp that have not shown a key yet. Each holds a descriptor and up to about
100 kB of ZMQ's memory."""

from __future__ import annotations

import os
import socket
import struct
from collections import Counter
from typing import TypeAlias

MAX_HANDSHAKES = 128
"""Connections in their handshake, per listening process. When there are more, the oldest one of the address
that has most of them is closed."""
MAX_REFUSAL_BYTES = 280
"""A peer without the key is sent at most this much: ZMTP's greeting (64), CURVE's WELCOME (170), ERROR (12).
With READY, which ends a handshake, it is 301 at least (ZeroMQ RFC 23 and 26)."""
_BYTES_ACKED = struct.Struct("=Q")
_BYTES_ACKED_OFFSET = 120
"""Offset of ``tcpi_bytes_acked`` in Linux's ``struct tcp_info``."""

Peer: TypeAlias = tuple[str, int]
"""Address and port."""


class HandshakeLimit:
    """Knows the open tcp connections of a listening socket by descriptor, oldest first.

    Descriptors belong to ZMQ, whose thread may close one and reuse its number at any time. So a connection is
    touched through a duplicate, and only if the duplicate has the address and port of the peer.
    """

    def __init__(self, limit: int = MAX_HANDSHAKES) -> None:
        self._limit = limit
        self._pending: dict[int, Peer] = {}
        self._per_host: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._pending)

    def on_accepted(self, descriptor: int) -> None:
        self.on_closed(descriptor)  # its number was reused
        peer = _peer_of(descriptor)
        if peer is not None:
            self._pending[descriptor] = peer
            self._per_host[peer[0]] += 1

    def on_closed(self, descriptor: int) -> None:
        peer = self._pending.pop(descriptor, None)
        if peer is not None:
            self._per_host[peer[0]] -= 1
            if not self._per_host[peer[0]]:
                del self._per_host[peer[0]]

    def close_excess(self) -> int:
        """Close connections until no more than the limit are in their handshake, and forget those that have
        ended it. Returns how many it has closed."""
        closed = 0
        while len(self._pending) > self._limit:
            host = max(self._per_host, key=self._per_host.__getitem__)
            descriptor = next(number for number, peer in self._pending.items() if peer[0] == host)
            closed += _close_unless_authenticated(descriptor, self._pending[descriptor])
            self.on_closed(descriptor)
        return closed


def _duplicate(descriptor: int) -> socket.socket:
    """Raises OSError if it is closed or no socket."""
    number = os.dup(descriptor)
    try:
        return socket.socket(fileno=number)
    except OSError:
        os.close(number)
        raise


def _peer_of(descriptor: int) -> Peer | None:
    """None: it is closed, or not tcp."""
    try:
        with _duplicate(descriptor) as connection:
            name = connection.getpeername()
    except OSError:
        return None
    return (name[0], name[1]) if isinstance(name, tuple) else None


def _close_unless_authenticated(descriptor: int, peer: Peer) -> bool:
    try:
        with _duplicate(descriptor) as connection:
            if connection.getpeername()[:2] != peer:
                return False  # another connection has the number
            information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            (acknowledged,) = _BYTES_ACKED.unpack_from(information, _BYTES_ACKED_OFFSET)
            if acknowledged > MAX_REFUSAL_BYTES:
                return False
            connection.shutdown(socket.SHUT_RDWR)
    except (OSError, struct.error, AttributeError):  # the last two where TCP_INFO is another or unknown
        return False
    return True
