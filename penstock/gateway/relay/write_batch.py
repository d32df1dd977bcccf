"""Collects writes to clients during one iteration of the event loop, and makes them at its end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from penstock.http.http1.chunks import CHUNK_SIZES
from penstock.http.write_target import WriteTarget
from penstock.streaming.rows.io_submit import BurstWriter, write_each

if TYPE_CHECKING:
    from penstock.gateway.relay.client_connection import HttpClientConnection


class WriteBatch:
    """Writes to all clients. An iteration reads from many model servers, or the events of many streams from
    one: written together they cost less than one by one (:mod:`penstock.streaming.rows.io_submit`), and reads
    and writes do not evict each other from the CPU's caches. A piece is delayed by at most one iteration.
    """

    def __init__(self, burst: BurstWriter = write_each) -> None:
        self._burst = burst
        self._waiting: dict[HttpClientConnection, bytes] = {}

    def write(self, client: HttpClientConnection, data: bytes) -> None:
        """Write bytes of the body at the end of the iteration."""
        waiting = self._waiting
        if client in waiting:
            waiting[client] += data
            return
        if not waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        waiting[client] = data

    def holds(self, client: HttpClientConnection) -> bool:
        """Whether a write to the client is to come."""
        return client in self._waiting

    def flush(self) -> None:
        """Make the collected writes now."""
        waiting, self._waiting = self._waiting, {}
        sockets: list[WriteTarget] = []
        chunks: list[bytes] = []
        for client, data in waiting.items():
            path = client.sink.write_target if client.streamed else None
            if path is None or path.descriptor < 0 or len(data) >= len(CHUNK_SIZES):
                client.sink.write_body(data)
            else:
                sockets.append(path)
                chunks.append(b"%b%b\r\n" % (CHUNK_SIZES[len(data)], data))
        if chunks:
            self._write_chunks(sockets, chunks)

    def _write_chunks(self, sockets: list[WriteTarget], chunks: list[bytes]) -> None:
        descriptors = np.array([path.descriptor for path in sockets], np.int64)
        sizes = np.array([len(chunk) for chunk in chunks], np.int64)
        for index, sent in self._burst(descriptors, b"".join(chunks), sizes):
            sockets[index].write_rest(chunks[index][sent:])

    def flush_client(self, client: HttpClientConnection) -> None:
        """Make the write to one client now, before another operation on its connection."""
        if data := self._waiting.pop(client, None):
            client.sink.write_body(data)

    def forget(self, client: HttpClientConnection) -> None:
        """Drop the write to a client that has disconnected."""
        self._waiting.pop(client, None)
