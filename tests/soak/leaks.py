"""Detects growth in memory, descriptors and objects of idle processes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import combinations

import msgspec

MIB = 1 << 20
HOUR_S = 3600.0
MIN_SAMPLES = 5
"""Minimum number of samples of a process, over MIN_SPAN_S seconds, for a verdict."""
MIN_SPAN_S = 240.0
MAX_FILES = 4
"""Allowed growth in files of the run directory: sockets are named by process numbers, which differ."""
MAX_DESCRIPTORS = 8
"""Allowed growth in descriptors of a process."""


class MemorySample(msgspec.Struct, frozen=True):
    """One idle process. ``requests``: all requests so far. ``objects``: those tracked by the garbage
    collector, None if unknown."""

    at_s: float
    requests: int
    resident_bytes: int
    descriptors: int
    objects: int | None = None


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """Growth of one process over the second half of the run. Slopes are medians over all pairs of samples
    (Theil-Sen estimator), which outliers do not affect."""

    process: str
    pid: int
    samples: int
    span_s: float
    resident_mib: float
    """At the end."""
    mib_per_hour: float
    kib_per_1000_requests: float
    descriptors: int
    """Growth from the first sample to the last."""
    objects_per_1000_requests: float | None
    judged: bool
    """Whether there were enough samples for a verdict."""


def growth(process: str, pid: int, samples: Sequence[MemorySample]) -> Growth:
    """From at least two samples."""
    first, last = samples[0], samples[-1]
    by_time = slope([(each.at_s, each.resident_bytes) for each in samples])
    by_request = slope([(each.requests, each.resident_bytes) for each in samples])
    objects = [(each.requests, each.objects) for each in samples if each.objects is not None]
    span = last.at_s - first.at_s
    return Growth(
        process=process,
        pid=pid,
        samples=len(samples),
        span_s=span,
        resident_mib=last.resident_bytes / MIB,
        mib_per_hour=by_time * HOUR_S / MIB,
        kib_per_1000_requests=by_request * 1000 / 1024,
        descriptors=last.descriptors - first.descriptors,
        objects_per_1000_requests=slope(objects) * 1000 if len(objects) > 1 else None,
        judged=len(samples) >= MIN_SAMPLES and span >= MIN_SPAN_S,
    )


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The median of the slopes between all pairs of points; 0 when no two differ in x."""
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if b[0] != a[0]]
    return statistics.median(slopes) if slopes else 0.0


def leaks(grown: Sequence[Growth], mib_per_hour: float, objects_per_1000: float) -> Iterator[str]:
    """Descriptions of processes that grow faster than allowed."""
    for each in grown:
        if not each.judged:
            continue
        who = f"{each.process} ({each.pid})"
        if each.mib_per_hour > mib_per_hour:
            yield f"{who} grows by {each.mib_per_hour:.1f} MiB an hour, at most {mib_per_hour:g} are allowed"
        if each.descriptors > MAX_DESCRIPTORS:
            yield f"{who} has {each.descriptors} descriptors more at the end"
        if (each.objects_per_1000_requests or 0.0) > objects_per_1000:
            yield f"{who} tracks {each.objects_per_1000_requests:,.0f} objects more per 1,000 requests"
