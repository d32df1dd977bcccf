"""Sends pages of pictures to engines that lack them: those of other hosts, which have their own store."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Protocol

from penstock.dispatch.connections import Connections, EngineState
from penstock.media.store import Lease
from penstock.wire.media.items import PIECE, PagePiece
from penstock.wire.messages import WireError, encode

PACE_S = 0.002
"""Time between two pieces of an engine, each of which takes about a millisecond: 500 MB/s, and the event
loop is never taken for long."""
MAX_WANTED = 256
"""Pictures that an engine may wait for at the same time."""


class LeaseOf(Protocol):
    """Finds the lease of a picture of a running request."""

    def __call__(self, key: bytes) -> Lease | None: ...


class PageSender:
    """The pages that engines of one API server wait for. Each engine gets one picture after the other."""

    def __init__(self, connections: Connections) -> None:
        self.lease_of: LeaseOf = lambda key: None
        self._connections = connections
        self._sending: dict[int, list[_Sending]] = {}
        """By rank of the engine: what it waits for, the first one under way."""

    def on_wanted(self, engine: EngineState, key: bytes) -> None:
        """Begin to send. Raises WireError for an engine that wants too much."""
        waiting = self._sending.setdefault(engine.rank, [])
        if len(waiting) >= MAX_WANTED:
            raise WireError(f"it waits for {len(waiting)} pictures, and wants another one")
        lease = self.lease_of(key)
        view = memoryview(b"") if lease is None else lease.view()
        waiting.append(_Sending(engine, key, view, engine.connections))
        if len(waiting) == 1:
            self._next(engine.rank)

    def _next(self, rank: int) -> None:
        waiting = self._sending[rank]
        while waiting and not waiting[0].is_wanted:
            waiting.pop(0)
        if waiting:
            first = waiting[0]
            self._connections.send(first.engine, encode(first.next_piece()))
            if first.done:
                waiting.pop(0)
        if waiting:
            asyncio.get_running_loop().call_later(PACE_S, self._next, rank)
        else:
            del self._sending[rank]


class _Sending:
    """A picture on its way."""

    def __init__(self, engine: EngineState, key: bytes, view: memoryview, connection: int) -> None:
        """``view``: the sealed file; empty: it is not there."""
        self.engine = engine
        self._connection = connection
        self._key = key
        self._view = view
        self._at = 0
        self._digest = hashlib.blake2b(digest_size=32)
        self.done = False

    @property
    def is_wanted(self) -> bool:
        """Whether the connection over which the engine has asked is there still."""
        return self.engine.link is not None and self.engine.connections == self._connection

    def next_piece(self) -> PagePiece:
        data = self._view[self._at : self._at + PIECE]
        self._digest.update(data)
        position, self._at = self._at, self._at + len(data)
        self.done = self._at == len(self._view)
        digest = self._digest.digest() if self.done and self._at else b""
        return PagePiece(self._key, position, bytes(data), digest)
