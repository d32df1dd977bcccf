"""Adds up the snapshots of all processes to the counters, histograms and gauges of the whole deployment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from penstock.metrics.families import METRIC_FAMILIES, MetricKind
from penstock.metrics.snapshot import Distribution, Labels, ProcessKey, Snapshot, Value

View: TypeAlias = Mapping[ProcessKey, Snapshot]
"""The latest snapshot of each known start of a process, and sums over starts. Starts of one process that are
of several incarnations are in the order in which they were heard of."""

Totals: TypeAlias = dict[str, dict[Labels, Value]]
"""Values by family and labels."""


def totals(view: View) -> Totals:
    """Sums of counters and histograms over all starts of all processes, and of gauges over each process's
    current start, by family and labels."""
    current = _current_starts(view)
    found: Totals = {}
    for key, snapshot in view.items():
        alive = current.get(key[0]) == key
        for each in snapshot.series:
            if alive or METRIC_FAMILIES[each.family].kind is not MetricKind.GAUGE:
                values = found.setdefault(each.family, {})
                before = values.get(each.labels)
                values[each.labels] = each.value if before is None else sum_of(before, each.value)
    return found


def _current_starts(view: View) -> dict[str, ProcessKey]:
    """Current start of each process: of one incarnation the start of the last epoch, of several the one heard
    of last."""
    current: dict[str, ProcessKey] = {}
    for key, snapshot in view.items():
        known = current.get(key[0], key)
        if not snapshot.covers and (known[1] != key[1] or known[2] <= key[2]):
            current[key[0]] = key
    return current


def sum_of(a: Value, b: Value) -> Value:
    """The sum of two values of one family."""
    if isinstance(a, Distribution):
        assert isinstance(b, Distribution)
        return a + b
    assert not isinstance(b, Distribution)
    return a + b


def greater_of(a: Value, b: Value) -> Value:
    """The greater of two values of one family; of histograms, bucket by bucket."""
    if isinstance(a, Distribution):
        assert isinstance(b, Distribution)
        return Distribution(tuple(map(max, a.counts, b.counts)), max(a.total, b.total))
    assert not isinstance(b, Distribution)
    return max(a, b)
