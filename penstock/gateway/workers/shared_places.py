"""What the workers of a gateway read of each other before they send a request: how many requests each has at
the servers, and who waits.

Each worker writes its figures into a file of the run directory that all others map. So a request counts for
all of them from the moment when it is sent, which datagrams, see :mod:`shared_state`, do not tell in time.
Nothing is locked: workers that decide at the same time each take what they see.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.workers.exchange import Exchange, WorkerName

MAX_ENTRIES = 4096
"""Endpoints, and sets of them for which requests wait; of more the others learn by datagrams."""
HEADER, ENTRY = 2, 3
"""Numbers of 64 bits. The header: entries that have been made, and how many sets have waiters. An entry: its
key, a count, and the rank of the first waiter, 0 without any."""
FILE_BYTES = 8 * (HEADER + ENTRY * MAX_ENTRIES)
TOPIC = "places"


class SharedPlaces:
    """One worker's part. Keys are hashes, which are the same in all workers."""

    def __init__(self, exchange: Exchange) -> None:
        self.on_wake: Callable[[], object] = lambda: None
        """Called when another worker has left a place to the requests that wait here."""
        self._exchange = exchange
        self._path = _path_of(exchange, exchange.own)
        with open(self._path, "xb+") as file:
            file.write(bytes(FILE_BYTES))  # not to run out of room later, which would be a signal
            file.flush()
            self._own = memoryview(mmap.mmap(file.fileno(), FILE_BYTES)).cast("q")
        self._entries: dict[int, int] = {}
        """Where each key has its entry."""
        self._others: dict[WorkerName, _Figures] = {}
        exchange.on(TOPIC, self._on_woken)
        exchange.on_joined.append(self._on_joined)
        exchange.on_gone.append(self._on_gone)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    # -- endpoints

    def follow(self, endpoints: Iterable[Endpoint]) -> None:
        """These are the endpoints from now on."""
        for endpoint in endpoints:
            if endpoint.on_count is None:
                endpoint.on_count = partial(self._count, hash(endpoint.url))

    def in_flight_elsewhere(self, endpoint: Endpoint) -> int:
        """Requests of the other workers at the endpoint; as datagrams told if one has no room for it."""
        counts = [each.read(hash(endpoint.url), 1) for each in self._others.values()]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else endpoint.in_flight - endpoint.own_in_flight

    def _count(self, key: int, count: int) -> None:
        if (at := self._entry(key, count)) is not None:
            self._own[at + 1] = count

    # -- sets of endpoints, see flow control

    def tell(self, key: int, promised: int, first: int) -> None:
        if (at := self._entry(key, promised or first)) is not None:
            self._own[at + 1] = promised
            self._own[1] += bool(first) - bool(self._own[at + 2])
            self._own[at + 2] = first

    def promised(self, key: int) -> int:
        return sum(each.read(key, 1) or 0 for each in self._others.values())

    def first(self, key: int) -> int:
        return min(filter(None, (each.read(key, 2) for each in self._others.values())), default=0)

    def wake(self) -> None:
        for worker, figures in list(self._others.items()):
            if figures.waiting:
                self._exchange.send(TOPIC, b"", worker)

    @property
    def are_waiting(self) -> bool:
        return any(each.waiting for each in self._others.values())

    def _entry(self, key: int, value: int) -> int | None:
        """Where the entry begins; None: there is none, and it would be empty, or there is no room."""
        at = self._entries.get(key)
        if at is None and value:
            if len(self._entries) < MAX_ENTRIES:
                at = HEADER + ENTRY * len(self._entries)
            elif (unused := next(self._unused(), None)) is not None:
                at = self._entries.pop(unused)
            else:
                return None
            self._entries[key] = at
            self._own[at] = key
            self._own[0] += 1
        return at

    def _unused(self) -> Iterator[int]:
        return (key for key, at in self._entries.items() if not (self._own[at + 1] or self._own[at + 2]))

    # -- the others

    def _on_woken(self, sender: WorkerName, data: bytes) -> None:
        self.on_wake()

    def _on_joined(self, sibling: WorkerName) -> None:
        with contextlib.suppress(OSError, ValueError), open(_path_of(self._exchange, sibling), "rb") as file:
            view = mmap.mmap(file.fileno(), FILE_BYTES, access=mmap.ACCESS_READ)
            self._others[sibling] = _Figures(memoryview(view).cast("q"))

    def _on_gone(self, sibling: WorkerName) -> None:
        """It has ended, or was killed: its requests are forgotten with it."""
        self._others.pop(sibling, None)
        with contextlib.suppress(OSError):
            os.unlink(_path_of(self._exchange, sibling))


class _Figures:
    """Those of another worker."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._made = 0
        """Entries that it had made when they were read."""
        self._entries: dict[int, int] = {}

    @property
    def waiting(self) -> bool:
        return self._view[1] > 0

    def read(self, key: int, column: int) -> int | None:
        """None: it had no room for all, and the key is not among those that it has."""
        view = self._view
        if view[0] != self._made:
            self._made = view[0]
            end = HEADER + ENTRY * min(self._made, MAX_ENTRIES)
            self._entries = {view[at]: at for at in range(HEADER, end, ENTRY)}
        at = self._entries.get(key)
        if at is None:
            return 0 if self._made < MAX_ENTRIES else None
        return view[at + column]


def _path_of(exchange: Exchange, worker: WorkerName) -> str:
    return os.path.join(exchange.run_dir, f"places.{worker}")
