"""What the workers of a gateway read of each other before they send a request: how many requests each has at
the servers, and who waits.

They map one file of the run directory, in which each worker has a slot that it alone writes. So a request
counts for all of them from the moment when it is sent, without a round trip. Nothing is locked: workers that
decide at the same time each take what they see.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Self

import numpy as np

from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.workers.keeper_link import KeeperLink
from penstock.gateway.workers.letters import WorkerName

MAX_ENTRIES = 4096
"""Endpoints, and sets of them for which requests wait, that one worker shows to the others."""
MAX_SLOTS = 512
"""Workers that run at the same time, those included that were replaced and serve what they have."""
HEADER, ENTRY = 4, 4
"""Numbers of 64 bits. An entry: its key, and of an endpoint the requests in
flight, those that its scraped load does not include, and their prompt tokens; of a set the places that were
promised, and the rank of its first waiter, 0 without any."""
VERSION, MADE, WAITING = range(3)
"""The header of a slot: its version, which rises with each new entry and each new owner, entries that were
made, and how many sets have waiters."""
FILE_HEADER = 8
"""Numbers of 64 bits before the first slot. The first one: slots that were ever used."""
WAKE = "places"
Counts = tuple[int, int, int]


class ScoreboardFile:
    """The supervisor's part: makes the file, and gives each worker a slot. Use it as a context."""

    def __init__(self, run_dir: str) -> None:
        self._file = os.open(_path(run_dir), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.truncate(self._file, 8 * (FILE_HEADER + MAX_SLOTS * _slot_size()))  # takes room as slots are used
        self._numbers = _mapped(self._file)
        self._free = set(range(MAX_SLOTS))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def take_slot(self) -> int:
        """A slot for a worker that starts. Raises OSError if there is no room for another one."""
        if not self._free:
            raise OSError(f"{MAX_SLOTS} workers run already")
        slot = min(self._free)
        self._clear(slot)
        self._free.remove(slot)
        self._numbers[0] = max(self._numbers[0], slot + 1)
        return slot

    def free_slot(self, slot: int) -> None:
        """Free the slot of a worker that has ended, or was killed: its requests are forgotten with it."""
        self._clear(slot)
        self._free.add(slot)

    def _clear(self, slot: int) -> None:
        start = _slot_start(slot)
        # Written, not mapped: not to run out of room later, which would be a signal.
        os.pwrite(self._file, bytes(8 * (_slot_size() - 1)), 8 * (start + 1))
        self._numbers[start] += 1


class Scoreboard:
    """One worker's part. Keys are hashes, which are the same in all workers."""

    def __init__(self, link: KeeperLink, run_dir: str, slot: int) -> None:
        self.on_wake: Callable[[], object] = lambda: None
        """Called when another worker has left a place to the requests that wait here."""
        self._link = link
        file = os.open(_path(run_dir), os.O_RDWR)
        try:
            self._numbers = _mapped(file)
        finally:
            os.close(file)
        self._slot = slot
        self._own = self._numbers[_slot_start(slot) : _slot_start(slot + 1)]
        self._entries: dict[int, int] = {}
        """Where each key has its entry."""
        self._slots: list[_OtherSlot] = []
        """Slots of other workers that were ever used."""
        self._seen = 0
        """Slots that were ever used, as far as this worker has seen."""
        link.on(WAKE, self._on_woken)

    # -- endpoints

    def follow(self, endpoints: Iterable[Endpoint]) -> None:
        """Follow these endpoints from now on."""
        for endpoint in endpoints:
            if endpoint.on_count is None:
                endpoint.on_count = partial(self._count, hash(endpoint.url))

    def in_flight_elsewhere(self, endpoint: Endpoint) -> int:
        """Requests of the other workers at the endpoint."""
        return 0 if self.alone else self._sum(hash(endpoint.url), 1)

    def counts_elsewhere(self, url: str) -> Counts:
        """Requests of the other workers at an endpoint, those that its scraped load does not include, and
        their prompt tokens."""
        key = hash(url)
        return self._sum(key, 1), self._sum(key, 2), self._sum(key, 3)

    def changed_keys(self) -> set[int]:
        """Keys of which other workers have changed their figures since the last call."""
        return set().union(*(each.changed_keys() for each in self._others()))

    def _count(self, key: int, in_flight: int, sent: int, tokens: int) -> None:
        at = self._entries.get(key)
        if at is not None or (at := self._entry(key, in_flight)) is not None:
            self._own[at + 1] = in_flight
            self._own[at + 2] = sent
            self._own[at + 3] = tokens

    # -- sets of endpoints, see flow control

    def publish(self, key: int, promised: int, first: int) -> None:
        at = self._entries.get(key)
        if at is not None or (at := self._entry(key, promised or first)) is not None:
            self._own[at + 1] = promised
            self._own[WAITING] += bool(first) - bool(self._own[at + 2])
            self._own[at + 2] = first

    def promised(self, key: int) -> int:
        return self._sum(key, 1)

    def first(self, key: int) -> int:
        return min(filter(None, (each.read(key, 2) for each in self._others())), default=0)

    def wake(self) -> None:
        if self.are_waiting:
            self._link.tell_others(WAKE, b"")

    @property
    def alone(self) -> bool:
        return not self._link.siblings

    @property
    def are_waiting(self) -> bool:
        return not self.alone and any(each.is_waiting for each in self._others())

    def _on_woken(self, caller: WorkerName | None, data: bytes) -> None:
        self.on_wake()

    # -- entries

    def _sum(self, key: int, column: int) -> int:
        return sum(each.read(key, column) for each in self._others())

    def _entry(self, key: int, value: int) -> int | None:
        """Where the entry begins; None: there is none, and it would be empty, or there is no room."""
        at = self._entries.get(key)
        if at is None and value:
            if len(self._entries) < MAX_ENTRIES:
                at = HEADER + ENTRY * len(self._entries)
                self._own[MADE] = len(self._entries) + 1
            elif (unused := next(self._unused(), None)) is not None:
                at = self._entries.pop(unused)
            else:
                return None
            self._entries[key] = at
            self._own[at] = key
            self._own[VERSION] += 1
        return at

    def _unused(self) -> Iterator[int]:
        return (key for key, at in self._entries.items() if not (self._own[at + 1] or self._own[at + 2]))

    def _others(self) -> list[_OtherSlot]:
        if self._seen != self._numbers[0]:
            for slot in range(self._seen, self._numbers[0]):
                if slot != self._slot:
                    self._slots.append(_OtherSlot(self._numbers[_slot_start(slot) : _slot_start(slot + 1)]))
            self._seen = self._numbers[0]
        return self._slots


class _OtherSlot:
    """The slot of another worker, or of none."""

    def __init__(self, numbers: memoryview[int]) -> None:
        self._numbers = numbers
        self._version = 0
        self._entries: dict[int, int] = {}
        """Where each key has its entry, as of that version."""
        self._rows = np.frombuffer(numbers, np.int64)[HEADER:].reshape(MAX_ENTRIES, ENTRY)
        self._known = self._rows[:0].copy()
        """Entries as of the last :meth:`changed_keys`."""

    @property
    def is_waiting(self) -> bool:
        return self._numbers[WAITING] > 0

    def read(self, key: int, column: int) -> int:
        """0 where there is no entry."""
        numbers = self._numbers
        if numbers[VERSION] != self._version:
            self._version = numbers[VERSION]
            end = HEADER + ENTRY * min(numbers[MADE], MAX_ENTRIES)
            self._entries = {numbers[at]: at for at in range(HEADER, end, ENTRY)}
        at = self._entries.get(key)
        return 0 if at is None else numbers[at + column]

    def changed_keys(self) -> set[int]:
        rows, known = self._rows[: self._numbers[MADE]].copy(), self._known
        self._known = rows
        both = min(len(rows), len(known))
        changed = np.flatnonzero((rows[:both] != known[:both]).any(axis=1))
        keys = (rows[changed, 0], known[changed, 0], rows[both:, 0], known[both:, 0])
        return {key for each in keys for key in each.tolist()}


def _slot_size() -> int:
    """Numbers of a slot."""
    return HEADER + ENTRY * MAX_ENTRIES


def _slot_start(slot: int) -> int:
    return FILE_HEADER + slot * _slot_size()


def _mapped(file: int) -> memoryview[int]:
    return memoryview(mmap.mmap(file, 0)).cast("B").cast("q")


def _path(run_dir: str) -> str:
    return os.path.join(run_dir, "scoreboard")
