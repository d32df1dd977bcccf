"""Time to first token and inter-token latency, from a log that takes two array appends per read."""

from __future__ import annotations

from array import array

import msgspec
import numpy as np
from numpy.typing import NDArray


class Latency(msgspec.Struct, frozen=True):
    """Distribution of durations, in milliseconds; all None for an empty set."""

    p50: float | None
    p90: float | None
    p99: float | None
    mean: float | None
    max: float | None

    @classmethod
    def of(cls, seconds: NDArray[np.float64]) -> Latency:
        """From durations float64[n] in seconds; percentiles are interpolated linearly."""
        if not len(seconds):
            return cls(None, None, None, None, None)
        values = [*np.percentile(seconds, (50, 90, 99)), seconds.mean(), seconds.max()]
        return cls(*(round(float(value) * 1000, 3) for value in values))


class ReadLog:
    """The reads of a load client in one round, in columns.

    The client appends to the arrays itself, as a method call per read would cost more than the appends:

    - ``entries`` int32[n]: the connection of a read, or ``~connection`` for the start of a request on it
    - ``counts`` uint16[n]: events that the read completed, 0 for a start
    - ``ends`` int64[b], ``times`` float64[b]: number of entries when a batch of reads ended, and its time
    - ``starts`` float64[r]: time of each start, in the order of their entries
    - ``failed`` int64[f]: indexes into ``starts`` of requests that went wrong; their times are left out

    Times are seconds of any one clock. A batch has one time, that of its end, so an event is never dated too
    early, and late by no more than a batch takes.
    """

    __slots__ = ("counts", "ends", "entries", "failed", "starts", "times")

    def __init__(self) -> None:
        self.entries = array("i")
        self.counts = array("H")
        self.ends = array("q")
        self.times = array("d")
        self.starts = array("d")
        self.failed = array("q")

    def start(self, connection: int, time: float) -> int:
        """A request starts; returns its index. Its later reads are those of ``connection``."""
        self.entries.append(~connection)
        self.counts.append(0)
        self.starts.append(time)
        return len(self.starts) - 1

    def end_batch(self, time: float) -> None:
        """End a batch: ``time`` is that of all reads since the last one."""
        self.ends.append(len(self.entries))
        self.times.append(time)

    @property
    def events(self) -> int:
        """All events, including those of failed requests."""
        return int(np.frombuffer(self.counts, np.uint16).sum(dtype=np.int64))

    def latencies(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Seconds to the first event of each request, and between consecutive events of a request.

        float64[requests with an event] and float64[events - requests with an event], in no particular order.
        Events of the same read have a gap of 0.
        """
        entries = np.frombuffer(self.entries, np.int32)
        counts = np.frombuffer(self.counts, np.uint16).astype(np.int64)
        starts = np.frombuffer(self.starts, np.float64)
        is_start = entries < 0
        connection = np.where(is_start, ~entries, entries)

        ends: NDArray[np.int64] = np.frombuffer(self.ends, np.int64)
        batch = np.searchsorted(ends, np.arange(len(entries)), side="right")
        time = np.frombuffer(self.times, np.float64)[batch]
        request = self._requests(connection, is_start)
        kept = counts > 0
        kept &= ~np.isin(request, np.frombuffer(self.failed, np.int64))
        # In order of requests, reads of a request in the order they were made.
        rows = np.flatnonzero(kept)
        rows = rows[np.argsort(request[rows], kind="stable")]
        first = np.diff(request[rows], prepend=-1) != 0
        to_first = time[rows[first]] - starts[request[rows[first]]]
        gaps = np.diff(time[rows])[~first[1:]]
        together = np.zeros(int((counts[rows] - 1).sum()))
        return to_first, np.concatenate((gaps, together))

    @staticmethod
    def _requests(connection: NDArray[np.int32], is_start: NDArray[np.bool_]) -> NDArray[np.int64]:
        """int64[n]: for every entry the index of the request it belongs to."""
        order = np.argsort(connection, kind="stable")
        # Ordered by connection, an entry belongs to the last start at or before it.
        index = np.cumsum(is_start) - 1
        position = np.maximum.accumulate(np.where(is_start[order], np.arange(len(order)), 0))
        request = np.empty(len(order), np.int64)
        request[order] = index[order][position]
        return request
