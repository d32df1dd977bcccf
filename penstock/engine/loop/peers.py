"""The API servers attached to an engine, and their open streams: the one record of both.

An API server is attached from its Hello until it disconnects, its connection breaks, it is refused, or a
successor takes its number. It is detached at one moment for everybody; its streams are dropped a little
later, between two messages or steps (:meth:`.inbox.Inbox.drop_disconnected`), before its number is attached
again.

The engine knows streams by small numbers, which are reused, instead of their API servers' handles: what is
indexed by them takes as much memory as there are open streams.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from penstock.engine.base import StepRows, StreamFailure
from penstock.engine.loop.backlog import Backlog
from penstock.engine.loop.kept_prompts import KeptPrompts
from penstock.wire.arrays import I32
from penstock.wire.messages import WireError

FIRST_STREAMS = 1024
_IDENTITY = re.compile(rb"api-server-([0-9]{1,10})-")


@dataclass(slots=True, eq=False)
class Peer:
    """An attached API server."""

    server: int
    """Number of the API server."""
    identity: bytes
    """Identity of the API server's ZMQ socket."""
    order: tuple[int, int, int] = (0, 0, 0)
    """Incarnation, epoch and connection: a later Hello of the same API server is greater."""
    streams: dict[int, int] = field(default_factory=dict)
    """Numbers of its open streams by handle."""
    backlog: Backlog = field(default_factory=Backlog)
    accepted: int = 0
    """Submits received on its connection."""


class Peers:
    """Attaches and detaches API servers; opens and closes their streams."""

    def __init__(self, kept_prompt_bytes: int = 0) -> None:
        """``kept_prompt_bytes``: of prompts that are kept for API servers."""
        self.prompts = KeptPrompts(kept_prompt_bytes)
        self.attach_count = 0
        """API servers attached since the start, reconnections included."""
        self._by_server: dict[int, Peer] = {}
        self._by_identity: dict[bytes, Peer] = {}
        self._left: list[Peer] = []
        """Detached, and their streams not dropped yet."""
        self._handles: I32 = np.zeros(FIRST_STREAMS, np.int32)
        """The handle of each number."""
        self._free = list(range(FIRST_STREAMS - 1, -1, -1))
        """Numbers without a stream."""
        self._ids: dict[int, tuple[str, ...]] = {}
        """Ids by number, of streams that have any."""

    # -- API servers come and go

    def __iter__(self) -> Iterator[Peer]:
        """The attached API servers; they may be detached during the iteration."""
        return iter(list(self._by_server.values()))

    def attach(self, server: int, identity: bytes, order: tuple[int, int, int] = (0, 0, 0)) -> Peer:
        """A predecessor of the same number must have been detached, and its streams dropped."""
        assert server not in self._by_server
        assert all(peer.server != server for peer in self._left)
        self.attach_count += 1
        peer = self._by_server[server] = self._by_identity[identity] = Peer(server, identity, order)
        return peer

    def detach(self, peer: Peer) -> None:
        """Nothing is sent to it from here on; :meth:`take_disconnected` returns it once."""
        if self._by_server.get(peer.server) is peer:
            del self._by_server[peer.server], self._by_identity[peer.identity]
            self._left.append(peer)
            self.prompts.forget(peer.identity)

    def get(self, server: int) -> Peer | None:
        return self._by_server.get(server)

    def find_peer(self, identity: bytes) -> Peer | None:
        return self._by_identity.get(identity)

    def take_disconnected(self) -> list[Peer]:
        """API servers that were detached since the last call; :meth:`close_all` frees their streams."""
        left, self._left = self._left, []
        return left

    @property
    def open_streams(self) -> int:
        return len(self._handles) - len(self._free)

    def accepted(self) -> dict[int, int]:
        """Submits received on the current connection of each API server."""
        return {server: peer.accepted for server, peer in self._by_server.items()}

    # -- streams come and go

    def open(self, peer: Peer, handle: int, ids: tuple[str, ...] = ()) -> int:
        """The number of a stream that begins, with :meth:`ids_of` its request. Raises WireError when the
        handle is in use."""
        if handle in peer.streams:
            raise WireError(f"it submits stream {handle}, which has not ended")
        if not self._free:
            size = len(self._handles)
            self._free = list(range(2 * size - 1, size - 1, -1))
            self._handles = np.concatenate((self._handles, np.zeros(size, np.int32)))
        number = self._free.pop()
        self._handles[number] = handle
        peer.streams[handle] = number
        if ids:
            self._ids[number] = ids
        return number

    def ids_of(self, number: int) -> tuple[str, ...]:
        """The ids by which clients know the request of an open stream."""
        return self._ids.get(number, ())

    def close(self, peer: Peer, handle: int) -> None:
        """A stream has ended; its number may be given to another one."""
        number = peer.streams.pop(handle)
        self._ids.pop(number, None)
        self._free.append(number)

    def close_all(self, peer: Peer) -> None:
        for number in peer.streams.values():
            self._ids.pop(number, None)
        self._free += peer.streams.values()
        peer.streams = {}

    def handle_of(self, number: int) -> int:
        """The API server's handle of an open stream."""
        return int(self._handles[number])

    def to_handles(self, rows: StepRows) -> StepRows:
        """Put handles in place of the engine's numbers, and close the streams that end in these rows."""
        numbers = rows.stream
        rows.stream = self._handles[numbers]
        if rows.kv_transfer_params:
            rows.kv_transfer_params = {
                server: {int(self._handles[number]): params for number, params in by_number.items()}
                for server, by_number in rows.kv_transfer_params.items()
            }
        if rows.routed:
            rows.routed = [
                (server, msgspec.structs.replace(message, stream=int(self._handles[message.stream])))
                for server, message in rows.routed
            ]
        if rows.failed:
            handles = [int(self._handles[failure.stream]) for failure in rows.failed]
            rows.failed = [
                replace(failure, stream=handle) for failure, handle in zip(rows.failed, handles, strict=True)
            ]
            self._close_failed(rows.failed)
        if rows.finish is not None:
            ended = np.flatnonzero(rows.finish)
            for server, handle in zip(rows.server[ended].tolist(), rows.stream[ended].tolist(), strict=True):
                self._close_of(server, handle)
        return rows

    def _close_failed(self, failures: list[StreamFailure]) -> None:
        for failure in failures:
            self._close_of(failure.server, failure.stream)

    def _close_of(self, server: int, handle: int) -> None:
        peer = self._by_server.get(server)
        if peer is not None:  # otherwise it has just left, and close_all follows
            self.close(peer, handle)


def peer_name(identity: bytes) -> str:
    """What logs call the peer of a ZMQ identity."""
    match = _IDENTITY.match(identity)
    return f"api-server {int(match[1])}" if match else "an unknown peer"
