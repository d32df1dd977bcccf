"""The metrics of every process of a fleet, as one process knows them, in bounded memory.

Of each process the snapshots of its last starts are kept, and the counters and histograms of its earlier
starts as one sum, which is a :class:`Snapshot` too. So counters never go backwards, however often processes
restart, and the order, route and repetition of snapshots do not matter.
Sums of two boards that know the same starts are equal; of sums that differ the greater values are kept.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock.logging_setup import RateLimitedLog
from penstock.metrics.families import METRIC_FAMILIES, MetricKind
from penstock.metrics.merge import Totals, greater_of, sum_of, totals
from penstock.metrics.snapshot import (
    Distribution,
    Labels,
    ProcessKey,
    Series,
    Snapshot,
    Value,
    decode_snapshot,
    encode_snapshot,
)
from penstock.wire.coordination import ProcessMetrics

_warn = RateLimitedLog(logging.getLogger(__name__))

MAX_BOARD_BYTES = 32 << 20
"""Maximum size of all snapshots together, encoded. 1,024 engines with three of 5 kB each have half of it."""
KEPT_STARTS = 2
"""Starts of a process that are not part of its sum: the current one, and the last one, whose final metrics
may still be under way."""
MAX_INCARNATIONS = 64
"""Incarnations per process whose starts in the sum are remembered; the oldest are forgotten."""
MAX_SUM_BYTES = 1 << 16
"""Maximum size of a sum, encoded; series for which there is no room are left out."""
_SUM_OVERHEAD = 64 * (9 + 5) + 256
"""Bytes of a sum besides its series: mostly ``covers``."""
# Processes of one role are numbered from 0 to 1,023.
_PROCESS = re.compile(r"(engine|api-server|coordinator|supervisor) (0|[1-9][0-9]{0,2}|10[01][0-9]|102[0-3])")

SeriesKey: TypeAlias = tuple[str, Labels]
_Values: TypeAlias = dict[SeriesKey, Value]


@dataclass(slots=True, frozen=True)
class BoardEntry:
    """An entry of the board."""

    key: ProcessKey
    """:attr:`Snapshot.key`."""
    sequence: int
    data: bytes
    """The encoded snapshot."""
    version: int = 0
    by: bytes = b""
    """Who sent it; empty for sums."""
    decoded: Snapshot | None = None

    @property
    def snapshot(self) -> Snapshot:
        return self.decoded or decode_snapshot(self.data)

    def message(self) -> ProcessMetrics:
        process, incarnation, epoch = self.key
        return ProcessMetrics(
            process=process,
            epoch=max(0, epoch),
            sequence=self.sequence,
            snapshot=self.data,
            incarnation=max(0, incarnation),
        )


@dataclass(slots=True)
class _Process:
    starts: dict[ProcessKey, BoardEntry] = field(default_factory=dict)
    """In the order in which they were heard of, those of one incarnation by epoch. The last one is
    current."""
    ended: BoardEntry | None = None
    """The sum."""
    covers: dict[int, int] = field(default_factory=dict)
    """The last epoch in the sum, by incarnation."""

    def entries(self) -> Iterator[BoardEntry]:
        if self.ended is not None:
            yield self.ended
        yield from self.starts.values()

    def place(self, posted: BoardEntry) -> None:
        """Add a start, or its later snapshot."""
        _, incarnation, epoch = posted.key
        if posted.key in self.starts:
            self.starts[posted.key] = posted
            return
        items = list(self.starts.items())
        followers = (n for n, (key, _) in enumerate(items) if key[1] == incarnation and key[2] > epoch)
        items.insert(next(followers, len(items)), (posted.key, posted))
        self.starts = dict(items)


class MetricsBoard:
    """Snapshots by process. ``version`` and ``by`` of entries are the caller's."""

    def __init__(self, *, for_totals: bool = False) -> None:
        """``for_totals``: keeps snapshots decoded as well, about five times their size, so that
        :meth:`totals` need not do it."""
        self._for_totals = for_totals
        self._processes: dict[str, _Process] = {}
        self._bytes = 0

    @property
    def size(self) -> int:
        """Bytes of all snapshots."""
        return self._bytes

    def __iter__(self) -> Iterator[BoardEntry]:
        for process in self._processes.values():
            yield from process.entries()

    def starts(self) -> Iterator[ProcessKey]:
        """The starts of processes that are not part of a sum."""
        for process in self._processes.values():
            yield from process.starts

    def find_entry(self, key: ProcessKey) -> BoardEntry:
        """The entry of one of :meth:`starts`."""
        return self._processes[key[0]].starts[key]

    def add_snapshot(self, snapshot: Snapshot, data: bytes, version: int = 0, by: bytes = b"") -> bool:
        """Add a snapshot and its encoding, which replaces earlier ones of the same start; returns whether it
        was news. Raises ValueError if the board is full, or no process has such a name."""
        role_and_index(snapshot.process)
        process = self._processes.get(snapshot.process) or _Process()
        before = sum(len(each.data) for each in process.entries())
        known = process.starts.get(snapshot.key)
        if self._bytes + len(data) - (len(known.data) if known else 0) > MAX_BOARD_BYTES:
            raise ValueError(f"no room for metrics of {snapshot.process} in {MAX_BOARD_BYTES} bytes")
        if snapshot.covers:
            news = self._add_sum(process, snapshot, version)
        else:
            decoded = snapshot if self._for_totals else None
            posted = BoardEntry(snapshot.key, snapshot.sequence, data, version, by, decoded)
            news = self._add_start(process, posted)
        if news:
            while len(process.starts) > KEPT_STARTS:
                self._fold(process, [next(iter(process.starts))], version)
            self._processes[snapshot.process] = process
            self._bytes += sum(len(each.data) for each in process.entries()) - before
        return news

    def add_or_log(self, snapshot: Snapshot, data: bytes, version: int = 0) -> None:
        """:meth:`add_snapshot`; a refusal is logged."""
        try:
            self.add_snapshot(snapshot, data, version)
        except ValueError as error:
            _warn("refused", "%s", error)

    def _add_start(self, process: _Process, posted: BoardEntry) -> bool:
        key = posted.key
        known = process.starts.get(key)
        if process.covers.get(key[1], -1) >= key[2] or (known and known.sequence >= posted.sequence):
            return False
        process.place(posted)
        return True

    def _add_sum(self, process: _Process, theirs: Snapshot, version: int) -> bool:
        before = process.ended and process.ended.data
        covered = [key for key in process.starts if theirs.covers.get(key[1], -1) >= key[2]]
        if covered:
            self._fold(process, covered, version)
        values = _values_of(process.ended)
        _combine(values, theirs.series, greater_of)
        self._store_sum(process, theirs.process, values, theirs.covers, version)
        if process.ended is not None and process.ended.data != before:
            return True
        return bool(covered)

    def _fold(self, process: _Process, keys: list[ProcessKey], version: int) -> None:
        """Move starts into the sum."""
        values = _values_of(process.ended)
        for key in keys:
            _combine(values, process.starts.pop(key).snapshot.series, sum_of)
        self._store_sum(process, keys[0][0], values, {key[1]: key[2] for key in keys}, version)

    def _store_sum(
        self, process: _Process, name: str, values: _Values, covers: Mapping[int, int], version: int
    ) -> None:
        for incarnation, epoch in covers.items():
            process.covers[incarnation] = max(epoch, process.covers.pop(incarnation, -1))
        while len(process.covers) > MAX_INCARNATIONS:
            del process.covers[next(iter(process.covers))]
        sequence = 0 if process.ended is None else process.ended.sequence
        series = [Series(*key, values[key]) for key in sorted(values)]
        covered = dict(sorted(process.covers.items()))
        snapshot = Snapshot(name, 0, 0, series, 0, covered)
        data = encode_snapshot(snapshot)
        if process.ended is None or process.ended.data != data:
            decoded = snapshot if self._for_totals else None
            process.ended = BoardEntry(snapshot.key, sequence + 1, data, version, b"", decoded)

    def totals(self, *others: Snapshot) -> Totals:
        """Totals over all processes; ``others``: later snapshots than those on the board."""
        view = {each.key: each.snapshot for each in self}
        for snapshot in others:
            view.pop(snapshot.key, None)
            view[snapshot.key] = snapshot
        return totals(view)


def role_and_index(process: str) -> tuple[str, int]:
    """Raises ValueError if this is no name that a process can have."""
    match = _PROCESS.fullmatch(process)
    if match is None:
        raise ValueError(f"metrics of {process[:80]!r}, which is no process")
    return match[1], int(match[2])


def _values_of(posted: BoardEntry | None) -> _Values:
    series: Iterable[Series] = () if posted is None else posted.snapshot.series
    return {(each.family, each.labels): each.value for each in series}


def _combine(values: _Values, series: Iterable[Series], combine: Callable[[Value, Value], Value]) -> None:
    """Combine counted series with those of a sum."""
    room = MAX_SUM_BYTES - _SUM_OVERHEAD - sum(_size_of(*item) for item in values.items())
    for each in series:
        if METRIC_FAMILIES[each.family].kind is MetricKind.GAUGE:
            continue
        key = each.family, each.labels
        known = values.get(key)
        if known is not None:
            values[key] = combine(known, each.value)
        elif (size := _size_of(key, each.value)) <= room:
            room -= size
            values[key] = each.value


def _size_of(key: SeriesKey, value: Value) -> int:
    """Maximum encoded size of a series, however great its numbers get."""
    texts = sum(5 + len(text.encode()) for text in (key[0], *key[1]))
    return texts + 10 + 9 * (2 + len(value.counts) if isinstance(value, Distribution) else 1)
