"""Merges the snapshots of all processes into the counters, histograms and gauges of the whole deployment.

Of each start of a process (incarnation and epoch) the latest snapshot is kept, also after the process has
ended. So totals never go backwards, and the order, route and repetition of snapshots do not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from penstock.metrics.families import METRIC_FAMILIES, MetricKind
from penstock.metrics.snapshot import Distribution, Labels, ProcessKey, Snapshot, Value

View: TypeAlias = Mapping[ProcessKey, Snapshot]
"""The latest snapshot of each known start of a process."""

Totals: TypeAlias = dict[str, dict[Labels, Value]]
"""Values by family and labels."""


def merge_views(*views: View) -> dict[ProcessKey, Snapshot]:
    """The union of views, with the latest snapshot of each start of a process.

    Commutative, associative and idempotent. No counter's total is less than in any of the views.
    """
    merged: dict[ProcessKey, Snapshot] = {}
    for view in views:
        for key, snapshot in view.items():
            known = merged.get(key)
            if known is None or known.sequence < snapshot.sequence:
                merged[key] = snapshot
    return merged


def view_of(*snapshots: Snapshot) -> dict[ProcessKey, Snapshot]:
    """A view of these snapshots."""
    return merge_views(*({snapshot.key: snapshot} for snapshot in snapshots))


def totals(view: View) -> Totals:
    """Sums of counters and histograms over all starts of all processes, and of gauges over each process's
    last start, by family and labels."""
    last: dict[str, ProcessKey] = {}
    for key in view:
        last[key[0]] = max(key, last.get(key[0], key))
    found: Totals = {}
    for key, snapshot in sorted(view.items()):
        alive = key == last[key[0]]
        for each in snapshot.series:
            if alive or METRIC_FAMILIES[each.family].kind is not MetricKind.GAUGE:
                values = found.setdefault(each.family, {})
                before = values.get(each.labels)
                values[each.labels] = each.value if before is None else _sum(before, each.value)
    return found


def _sum(a: Value, b: Value) -> Value:
    """The sum of two values of one family."""
    if isinstance(a, Distribution):
        assert isinstance(b, Distribution)
        return a + b
    assert not isinstance(b, Distribution)
    return a + b
