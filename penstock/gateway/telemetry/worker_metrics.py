"""The metrics of one worker of the gateway, as the others get them, and their sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from penstock.metrics.merge import sum_of
from penstock.metrics.snapshot import Distribution, Labels, Series, Value


class WorkerMetrics(msgspec.Struct, array_like=True, frozen=True):
    """What one worker counts: counters and histograms, and gauges, which end with it."""

    counted: list[Series]
    gauges: list[Series]


def add(a: Value, b: Value) -> Value:
    """Sum of two values; ``a`` if they are of two kinds, or have other buckets, as those of two versions
    may."""
    if isinstance(a, Distribution) and isinstance(b, Distribution):
        return sum_of(a, b) if len(a.counts) == len(b.counts) else a
    return a if isinstance(a, Distribution) or isinstance(b, Distribution) else a + b


def summed(values: Mapping[Labels, Value], others: Iterable[Series]) -> dict[Labels, Value]:
    """The values of one family, with those of other workers added."""
    total = dict(values)
    for each in others:
        known = total.get(each.labels)
        total[each.labels] = each.value if known is None else add(known, each.value)
    return total
