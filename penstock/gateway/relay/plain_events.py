"""Relays events that differ from the one before only in text and number: all of one read, by columns.

Such events are most of what a gateway relays. A stream whose events are known takes the fast path
(:mod:`penstock.gateway.upstream.reply_scanner`): its counts and its way to the client are entries of columns,
so that an event costs a few array elements instead of calls of a dozen objects. All other bytes of a stream,
and all streams that cannot have it, take the way through :class:`penstock.gateway.relay.attempt.Attempt`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.gateway.metric_definitions import ITL
from penstock.gateway.responses.event_template import are_texts
from penstock.gateway.responses.response_observer import EventCounts
from penstock.http.http2.flow_windows import FlowWindows, first_rows
from penstock.http.write_target import WriteTarget
from penstock.streaming.rows.http_framing import (
    CHUNK_HEADERS,
    CHUNK_LENGTHS,
    FRAME_LENGTHS,
    MAX_EVENT,
    Objects,
    objects,
)
from penstock.streaming.rows.io_submit import BurstWriter, write_each

if TYPE_CHECKING:
    from penstock.gateway.relay.attempt import Attempt

_BOUNDS = np.array(ITL.bounds)
MAX_TURNS = 4
"""Iterations of the event loop for which events wait for others,"""
MAX_WAITING = 1024
"""and events that wait, from which on they are written."""
NONE, CHUNK, FRAME = 0, 1, 2
"""How a stream's events are written: it has no fast path; as chunks of HTTP/1.1; as frames of HTTP/2."""

Rows = NDArray[np.intp]


class PlainEvents:
    """The fast path of a process's streams. Columns are by slot."""

    def __init__(
        self, burst: BurstWriter = write_each, windows: FlowWindows | None = None, slots: int = 256
    ) -> None:
        """``burst`` writes to clients of HTTP/1.1, ``windows`` are those of clients of HTTP/2."""
        self._burst = burst
        self._windows = windows or FlowWindows()
        self._owners: list[Attempt | None] = []
        self._paths: list[WriteTarget | None] = []
        self._free: list[int] = []
        self._way = np.zeros(0, np.int8)
        self._target = np.zeros(0, np.int64)
        """Descriptor of the socket, or slot in the windows."""
        self._prefix = np.zeros(0, np.object_)
        """Prefix of frames of HTTP/2: what follows their length."""
        self._last_at = np.zeros(0)
        """When the latest event came."""
        self._events = np.zeros(0, np.int64)
        self._size = np.zeros(0, np.int64)
        """Events and bytes since the fast path was entered."""
        self._allowed = np.zeros(0, np.int64)
        """Bytes that may come before the fast path is left."""
        self._gaps = np.zeros((0, len(_BOUNDS) + 1), np.int32)
        """Intervals between events since the fast path was entered, by buckets."""
        self._waiting_slots: list[int] = []
        self._waiting: list[bytes] = []
        """Events that are counted and written soon, of all connections together."""
        self._now = 0.0
        self._scheduled = False
        self._turns = self._seen = 0
        """Iterations since then, and events that waited in the latest one."""
        self._grow(slots)

    def _grow(self, slots: int) -> None:
        old = len(self._owners)
        self._owners += [None] * slots
        self._paths += [None] * slots
        self._free += range(old + slots - 1, old - 1, -1)
        for name in ("_way", "_target", "_prefix", "_last_at", "_events", "_size", "_allowed", "_gaps"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate((column, np.zeros((slots, *column.shape[1:]), column.dtype))))

    # -- the fast path

    def open(self, owner: Attempt) -> int:
        """A slot for a stream."""
        if not self._free:
            self._grow(len(self._owners))
        slot = self._free.pop()
        self._owners[slot] = owner
        return slot

    def close(self, slot: int) -> None:
        """The stream has ended, and left the fast path."""
        self._owners[slot] = None
        self._free.append(slot)

    def enter(self, slot: int, path: WriteTarget, last_at: float, allowed: int) -> None:
        """The stream's plain events come by the fast path, and are written to ``path``. ``last_at``: when its
        latest event came."""
        self._paths[slot] = path
        if path.descriptor >= 0:
            self._way[slot], self._target[slot] = CHUNK, path.descriptor
        else:
            self._way[slot], self._target[slot], self._prefix[slot] = FRAME, path.window, path.prefix
        self._last_at[slot], self._allowed[slot] = last_at, allowed
        self._events[slot] = self._size[slot] = 0
        self._gaps[slot] = 0

    def leave(self, slot: int, *, gone: bool) -> EventCounts:
        """The stream's events come in another way again; what came by the fast path is written. ``gone``:
        except to this stream's client, which has disconnected."""
        if gone:
            self._way[slot] = NONE
        if self._waiting:
            self.flush()
        self._way[slot] = NONE
        self._paths[slot] = None
        return EventCounts(
            int(self._events[slot]),
            int(self._size[slot]),
            float(self._last_at[slot]),
            self._gaps[slot].tolist(),
        )

    def last_at(self, slot: int) -> float:
        """When the latest event came by the fast path."""
        return float(self._last_at[slot])

    # -- events

    def relay_events(self, slots: list[int], events: list[bytes], texts: list[bytes], now: float) -> None:
        """See :class:`penstock.gateway.upstream.reply_scanner.PlainEventRelay`."""
        others: list[tuple[int, bytes]] = []
        if not are_texts(texts):
            slots, events, others = _split(slots, events, texts)
        if slots:
            self._schedule()
        self._waiting_slots += slots
        self._waiting += events
        self._now = now
        for slot, event in others:
            owner = self._owners[slot]
            if owner is not None:
                owner.on_other_event(event, now)

    def add_event(self, slot: int, event: bytes, now: float) -> None:
        """Relay one plain event."""
        self._schedule()
        self._waiting_slots.append(slot)
        self._waiting.append(event)
        self._now = now

    def _schedule(self) -> None:
        """Flush soon: after the first iteration of the event loop that brings no more, or a few."""
        if not self._scheduled:
            self._scheduled, self._turns, self._seen = True, 0, 0
            asyncio.get_running_loop().call_soon(self._flush_unless_more)

    def _flush_unless_more(self) -> None:
        self._turns += 1
        if self._seen < len(self._waiting) < MAX_WAITING and self._turns < MAX_TURNS:
            self._seen = len(self._waiting)
            asyncio.get_running_loop().call_soon(self._flush_unless_more)
        else:
            self._scheduled = False
            self.flush()

    def flush(self) -> None:
        """Count and write what waits."""
        slots, events = self._waiting_slots, self._waiting
        self._waiting_slots, self._waiting = [], []
        if not events:
            return
        counts: NDArray[np.int64] | int = 1
        if len(set(slots)) < len(slots):
            slots, events, counts = _merged(slots, events)
        rows = np.array(slots, np.intp)
        sizes = np.fromiter(map(len, events), np.int64, len(events))
        self._count(rows, sizes, counts)
        ways = self._way.take(rows)
        if sizes.max() >= MAX_EVENT:
            for row in np.flatnonzero((sizes >= MAX_EVENT) & (ways != NONE)).tolist():
                self._write_one(slots[row], events[row])
            ways[sizes >= MAX_EVENT] = NONE
        column = objects(events)
        for way, write in ((CHUNK, self._write_chunks), (FRAME, self._write_frames)):
            count = np.count_nonzero(ways == way)
            if count == len(rows):
                write(rows, sizes, column)
            elif count:
                of_way = np.flatnonzero(ways == way)
                write(rows[of_way], sizes[of_way], column[of_way])
        left = self._allowed.take(rows)
        if left.min() <= 0:
            for slot in rows[left <= 0].tolist():
                self._leave(slot)

    def _count(self, rows: Rows, sizes: NDArray[np.int64], counts: NDArray[np.int64] | int) -> None:
        """Count the events of distinct streams; those that came together have no interval between them."""
        gaps = self._now - self._last_at.take(rows)
        self._gaps[rows, np.searchsorted(_BOUNDS, gaps)] += 1
        if not isinstance(counts, int):
            self._gaps[rows, 0] += counts - 1
        self._last_at[rows] = self._now
        self._events[rows] += counts
        self._size[rows] += sizes
        self._allowed[rows] -= sizes

    def _leave(self, slot: int) -> None:
        owner = self._owners[slot]
        if owner is not None and self._way[slot]:
            owner.leave_fast_path()

    def _write_one(self, slot: int, event: bytes) -> None:
        """Write by the connection, which holds what does not fit."""
        owner = self._owners[slot]
        assert owner is not None
        owner.leave_fast_path()
        owner.sink.write_body(event)

    def _write_chunks(self, rows: Rows, sizes: NDArray[np.int64], events: Objects) -> None:
        """Write chunks to sockets; what a socket does not take goes to its connection."""
        parts = np.empty(3 * len(rows), np.object_)
        parts[0::3], parts[1::3], parts[2::3] = CHUNK_HEADERS.take(sizes), events, b"\r\n"
        data = b"".join(parts.tolist())
        lengths = CHUNK_LENGTHS.take(sizes)
        for index, sent in self._burst(self._target.take(rows), data, lengths):
            slot = int(rows[index])
            path = self._paths[slot]
            assert path is not None
            end = int(lengths[: index + 1].sum())
            self._leave(slot)
            path.write_rest(data[end - int(lengths[index]) + sent : end])

    def _write_frames(self, rows: Rows, sizes: NDArray[np.int64], events: Objects) -> None:
        """Write frames, one write for each connection; those that a window has no room for go to their
        streams."""
        windows = self._windows
        slots = self._target.take(rows)
        connections = windows.connection_of.take(slots)
        order = connections.argsort(kind="stable")
        rows, slots, sizes, events = rows[order], slots[order], sizes[order], events[order]
        connections = connections[order]
        starts = first_rows(connections)
        if not windows.take_windows(slots, sizes, starts):
            refused = windows.without_room(slots, sizes, starts)
            if len(granted := np.flatnonzero(~refused)):
                self._write_frames(rows[granted], sizes[granted], events[granted])
            for row in np.flatnonzero(refused).tolist():
                self._write_one(int(rows[row]), events[row])
            return
        parts = np.empty(3 * len(rows), np.object_)
        parts[0::3], parts[1::3], parts[2::3] = FRAME_LENGTHS.take(sizes), self._prefix.take(rows), events
        windows.write(parts.tolist(), connections.take(starts), [*(3 * starts).tolist(), len(parts)])


def _merged(slots: list[int], events: list[bytes]) -> tuple[list[int], list[bytes], NDArray[np.int64]]:
    """The events of each slot joined, and their number."""
    by_slot: dict[int, list[bytes]] = {}
    for slot, event in zip(slots, events, strict=True):
        by_slot.setdefault(slot, []).append(event)
    merged = [b"".join(of_slot) for of_slot in by_slot.values()]
    return list(by_slot), merged, np.array([len(of_slot) for of_slot in by_slot.values()], np.int64)


def _split(
    slots: list[int], events: list[bytes], texts: list[bytes]
) -> tuple[list[int], list[bytes], list[tuple[int, bytes]]]:
    """Slots and events that are plain, and the others: those that are not, and what follows them in their
    streams."""
    others: list[tuple[int, bytes]] = []
    left: set[int] = set()
    plain_slots: list[int] = []
    plain: list[bytes] = []
    for slot, event, text in zip(slots, events, texts, strict=True):
        if slot in left or not are_texts([text]):
            left.add(slot)
            others.append((slot, event))
        else:
            plain_slots.append(slot)
            plain.append(event)
    return plain_slots, plain, others
