"""The snapshot of a process's metrics, as it is sent to others (:mod:`penstock.metrics.board` keeps them).

A snapshot is cumulative since the start of its process. ``incarnation`` is the run of its supervisor,
``epoch`` counts restarts within that run.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec
from msgspec import Meta

from penstock.metrics.families import (
    GC_FREED,
    GC_PAUSE,
    METRIC_FAMILIES,
    RESTARTS,
    SPANS,
    START_TIME,
    MetricFamily,
    MetricKind,
)
from penstock.metrics.gc_policy import GcPauses
from penstock.wire.messages import Count, Incarnation

if TYPE_CHECKING:  # numpy, which the supervisor does without
    from penstock.metrics.histogram import Histogram

_STARTED = time.time()
"""When this process started: each one imports this module early, or is a fork of one that did."""


def _restart_clock() -> None:
    global _STARTED
    _STARTED = time.time()


os.register_at_fork(after_in_child=_restart_clock)

Labels: TypeAlias = tuple[str, ...]
"""Values of a family's labels, in the order of the family."""


class Distribution(msgspec.Struct, array_like=True, frozen=True):
    """A histogram: observations per bucket of its family's bounds, then those above all bounds; their sum."""

    counts: tuple[int, ...]
    total: float

    def __add__(self, other: Distribution) -> Distribution:
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        return Distribution(counts, self.total + other.total)


Value: TypeAlias = float | Distribution

ProcessKey: TypeAlias = tuple[str, int, int]
"""Process, incarnation and epoch: one start of a process. Within an incarnation, the later start has the
greater epoch."""


class Series(msgspec.Struct, array_like=True, frozen=True):
    """The value of one family with one set of labels."""

    family: str
    labels: Labels
    value: Value


class Snapshot(msgspec.Struct, array_like=True, frozen=True):
    """All series of one process. ``sequence`` increases within an epoch."""

    process: str
    epoch: Count
    sequence: Annotated[int, Meta(ge=0)]
    series: list[Series]
    incarnation: Incarnation = 0
    covers: dict[Incarnation, Count] = {}
    """Not empty: this is the sum of earlier starts of the process, without gauges. By incarnation, the last
    epoch in it."""

    @property
    def key(self) -> ProcessKey:
        """The process and its start; a sum of snapshots has no start."""
        return (self.process, -1, -1) if self.covers else (self.process, self.incarnation, self.epoch)


def process_name(role: str, index: int) -> str:
    """A process's name in snapshots and labels; ``role``: supervisor, or the role of a child."""
    return f"{role} {index}"


def role_of(process: str) -> str:
    """The role in a :func:`process_name`."""
    return process.rpartition(" ")[0]


MAX_SNAPSHOT_BYTES = 1 << 20
"""Maximum size of an encoded snapshot; that of an engine has about 5 kB."""
MAX_LABEL_LENGTH = 1024
"""Maximum characters of a label's value."""

encode_snapshot = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Snapshot)


def histogram_series(family: MetricFamily, labels: Labels, histogram: Histogram) -> Series:
    """A histogram's current counts as a series of ``family``."""
    return Series(family.name, labels, Distribution(tuple(histogram.counts.tolist()), histogram.total))


def process_series(
    process: str, restarts: int, pauses: GcPauses | None, spans: Mapping[str, int] | None = None
) -> Iterator[Series]:
    """The series that every process has; ``process``: value of the label of that name. ``spans``: their
    numbers by state."""
    yield Series(RESTARTS.name, (process,), restarts)
    yield Series(START_TIME.name, (process,), _STARTED)
    for state, count in (spans or {}).items():
        yield Series(SPANS.name, (process, state), count)
    if pauses is not None:
        for generation, counts in enumerate(pauses.counts):
            labels = process, str(generation)
            yield Series(GC_PAUSE.name, labels, Distribution(tuple(counts), pauses.total_s[generation]))
            yield Series(GC_FREED.name, labels, pauses.freed[generation])


def decode_snapshot(data: bytes) -> Snapshot:
    """Raises ValueError if ``data`` is not a snapshot or too large. Omits series whose family is unknown here
    or has another shape, as those of another version may, and those with values that are no numbers."""
    if len(data) > MAX_SNAPSHOT_BYTES:
        raise ValueError(f"a snapshot of {len(data)} bytes, at most {MAX_SNAPSHOT_BYTES} are taken")
    try:
        snapshot = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a snapshot: {error}") from None
    known = [each for each in snapshot.series if _fits(each)]
    return msgspec.structs.replace(snapshot, series=known)


def _fits(each: Series) -> bool:
    family = METRIC_FAMILIES.get(each.family)
    if family is None or len(each.labels) != len(family.labels):
        return False
    if max(map(len, each.labels), default=0) > MAX_LABEL_LENGTH:
        return False
    if isinstance(each.value, Distribution):
        return (
            family.kind is MetricKind.HISTOGRAM
            and len(each.value.counts) == len(family.bounds) + 1
            and min(each.value.counts) >= 0
            and math.isfinite(each.value.total)
        )
    return family.kind is not MetricKind.HISTOGRAM and math.isfinite(each.value)
