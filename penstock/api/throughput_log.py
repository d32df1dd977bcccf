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
"""Token counts by engine."""


class ThroughputLog:
    """Logs the throughput since the previous line; silent when idle.

    Every API server keeps the counts, so that another one can take over, but only the ``enabled`` one logs.
    """

    def __init__(self, totals: Callable[[], Totals], enabled: Callable[[], bool]) -> None:
        self._totals = totals
        self._enabled = enabled
        self._before: tuple[float, _Counts, _Counts] | None = None
        """Time of the previous call, and each engine's prompt and generated tokens at that time."""
        self._idle = True

    def write(self, now: float) -> None:
        """Log one line, unless all engines were idle now and at the previous call, or this log is disabled.

        Tokens that an engine had counted before the first call for it are not included.
        """
        found = self._totals()
        prompt, generated = found.get(f.PROMPT_TOKENS.name, {}), found.get(f.GENERATION_TOKENS.name, {})
        running, waiting = _sum(found, f.RUNNING), _sum(found, f.WAITING)
        kv_used = max(map(_number, found[f.KV_USAGE.name].values()), default=0.0)
        before, self._before = self._before, (now, prompt, generated)
        if before is None:
            return
        took = max(now - before[0], 1e-9)
        prompt_added, generated_added = _added(prompt, before[1]), _added(generated, before[2])
        idle = not running and not waiting and not prompt_added and not generated_added
        if self._enabled() and not (idle and self._idle):
            log.info(
                "running %d, waiting %d, KV cache %.1f %%, prompts %.0f tokens/s, generated %.0f tokens/s",
                running,
                waiting,
                100 * kv_used,
                prompt_added / took,
                generated_added / took,
            )
        self._idle = idle


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
