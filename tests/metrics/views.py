"""Views of snapshots, as totals are made of."""

from __future__ import annotations

from penstock.metrics.snapshot import ProcessKey, Snapshot


def view_of(*snapshots: Snapshot) -> dict[ProcessKey, Snapshot]:
    """A view of these snapshots, of which the last one of each start counts."""
    view: dict[ProcessKey, Snapshot] = {}
    for snapshot in snapshots:
        known = view.get(snapshot.key)
        if known is None or known.sequence < snapshot.sequence:
            view[snapshot.key] = snapshot
    return view
