"""The throughput log: a line with running and waiting streams and tokens/s of all engines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TypeAlias

from penstock.metrics import families as f
from penstock.metrics.merge import Totals
from penstock.metrics.snapshot import Labels, Value

log = logging.getLogger(__name__)

_Counts: TypeAlias = Mapping[Labels, Value]
"""Counts by engine."""
_COUNTED = (
    f.PROMPT_TOKENS,
    f.GENERATION_TOKENS,
    f.SPEC_DRAFTS,
    f.SPEC_DRAFT_TOKENS,
    f.SPEC_ACCEPTED,
)
"""The line is about what these have grown by."""


class ThroughputLog:
    """Logs the throughput since the previous line; silent when idle.

    Every API server keeps the counts, so that another one can take over, but only the ``enabled`` one logs.
    """

    def __init__(self, totals: Callable[[], Totals], enabled: Callable[[], bool]) -> None:
        self._totals = totals
        self._enabled = enabled
        self._before: tuple[float, dict[f.MetricFamily, _Counts]] | None = None
        """Time of the previous call, and the counts at that time."""
        self._idle = True

    def write(self, now: float) -> None:
        """Log one line, unless all engines were idle now and at the previous call, or this log is disabled.

        Tokens that an engine had counted before the first call for it are not included.
        """
        found = self._totals()
        counts: dict[f.MetricFamily, _Counts] = {family: found.get(family.name, {}) for family in _COUNTED}
        running, waiting = _sum(found, f.RUNNING), _sum(found, f.WAITING)
        kv_used = max(map(_number, found[f.KV_USAGE.name].values()), default=0.0)
        before, self._before = self._before, (now, counts)
        if before is None:
            return
        took = max(now - before[0], 1e-9)
        added = {family: _added(now_counted, before[1][family]) for family, now_counted in counts.items()}
        idle = not (running or waiting or any(added.values()))
        if self._enabled() and not (idle and self._idle):
            log.info(
                "running %d, waiting %d, KV cache %.1f %%, prompts %.0f tokens/s, generated %.0f tokens/s%s",
                running,
                waiting,
                100 * kv_used,
                added[f.PROMPT_TOKENS] / took,
                added[f.GENERATION_TOKENS] / took,
                _speculation(added),
            )
        self._idle = idle


def _speculation(added: Mapping[f.MetricFamily, float]) -> str:
    """The end of the line: nothing without drafts."""
    drafts, drafted, accepted = (added[family] for family in _COUNTED[2:])
    if not drafts or not drafted:
        return ""
    share, per_step = 100 * accepted / drafted, 1 + accepted / drafts
    return f", accepted {share:.1f} % of drafts, {per_step:.1f} tokens per step with a draft"


def _sum(found: Totals, family: f.MetricFamily) -> float:
    return sum(map(_number, found.get(family.name, {}).values()))


def _added(counts: _Counts, before: _Counts) -> float:
    """Growth since ``before``, over engines that were known then."""
    return sum(
        _number(count) - _number(before[labels]) for labels, count in counts.items() if labels in before
    )


def _number(value: Value) -> float:
    assert isinstance(value, int | float)
    return value
