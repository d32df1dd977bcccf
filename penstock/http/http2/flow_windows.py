"""The send windows of all HTTP/2 streams and connections of a process (RFC 9113 §5.2), as columns.

They are the only account of them: the row writer takes from them by array, connections one stream at a time.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

MAX_CONNECTIONS = 1 << 16
"""Connection slots are uint16, which sorts in linear time."""


class FrameWriter(Protocol):
    """A connection that takes DATA frames of several streams."""

    def write_frames(self, frames: bytes) -> None:
        """Write complete frames, whose bytes have been taken from the windows; never blocks."""
        ...


class FlowWindows:
    """Windows by slot, in bytes; a window may be negative (RFC 9113 §6.9.2)."""

    def __init__(self, streams: int = 64, connections: int = 8) -> None:
        self.streams = np.zeros(streams, np.int64)
        self.connection_of = np.zeros(streams, np.uint16)
        """Connection slot of each stream."""
        self.connections = np.zeros(connections, np.int64)
        self.writers: list[FrameWriter | None] = [None] * connections
        self.connection_count = 0
        self._free_streams = list(range(streams - 1, -1, -1))
        self._free_connections = list(range(connections - 1, -1, -1))

    def add_connection(self, writer: FrameWriter, window: int) -> int:
        """A slot for a connection."""
        if not self._free_connections:
            old = len(self.connections)
            if old >= MAX_CONNECTIONS:
                raise OverflowError(f"more than {MAX_CONNECTIONS} HTTP/2 connections")
            self.connections = np.concatenate((self.connections, np.zeros(old, np.int64)))
            self.writers.extend([None] * old)
            self._free_connections.extend(range(2 * old - 1, old - 1, -1))
        slot = self._free_connections.pop()
        self.connections[slot] = window
        self.writers[slot] = writer
        self.connection_count += 1
        return slot

    def remove_connection(self, slot: int) -> None:
        """The connection is closed, and its streams are removed."""
        self.writers[slot] = None
        self.connections[slot] = 0
        self.connection_count -= 1
        self._free_connections.append(slot)

    def add_stream(self, connection: int, window: int) -> int:
        """A slot for a stream of a connection."""
        if not self._free_streams:
            old = len(self.streams)
            self.streams = np.concatenate((self.streams, np.zeros(old, np.int64)))
            self.connection_of = np.concatenate((self.connection_of, np.zeros(old, np.uint16)))
            self._free_streams.extend(range(2 * old - 1, old - 1, -1))
        slot = self._free_streams.pop()
        self.streams[slot] = window
        self.connection_of[slot] = connection
        return slot

    def remove_stream(self, slot: int) -> None:
        self.streams[slot] = 0
        self._free_streams.append(slot)

    # -- rows, in the order of their connections

    def take_windows(
        self, slots: NDArray[np.int64], sizes: NDArray[np.int64], starts: NDArray[np.intp]
    ) -> bool:
        """Take the bytes of rows from the windows of their streams, which are distinct, and of their
        connections; False, and nothing is taken, if one has no room. ``starts``: see :func:`first_rows`."""
        connections = self.connection_of.take(slots.take(starts))
        left = self.streams.take(slots) - sizes
        room = self.connections.take(connections) - np.add.reduceat(sizes, starts)
        if np.count_nonzero(left < 0) or np.count_nonzero(room < 0):
            return False
        self.streams[slots] = left
        self.connections[connections] = room
        return True

    def without_room(
        self, slots: NDArray[np.int64], sizes: NDArray[np.int64], starts: NDArray[np.intp]
    ) -> NDArray[np.bool_]:
        """bool[R]: the rows for which :meth:`take_windows` has no room: of a stream, or of a connection for
        all its rows."""
        connections = self.connection_of.take(slots)
        of_starts = connections.take(starts)
        closed = of_starts[self.connections.take(of_starts) < np.add.reduceat(sizes, starts)]
        lacking: NDArray[np.bool_] = (self.streams.take(slots) < sizes) | np.isin(connections, closed)
        return lacking

    def write(self, parts: list[bytes], connections: NDArray[np.uint16], bounds: list[int]) -> None:
        """Write to each connection its parts of frames, which begin at its bound."""
        for connection, start, end in zip(connections.tolist(), bounds[:-1], bounds[1:], strict=True):
            writer = self.writers[connection]
            assert writer is not None  # a stream of it is open
            writer.write_frames(b"".join(parts[start:end]))


def first_rows(connections: NDArray[np.uint16]) -> NDArray[np.intp]:
    """Index of the first row of each connection; ``connections``: of rows, sorted."""
    return np.concatenate(([0], np.flatnonzero(connections[1:] != connections[:-1]) + 1))
