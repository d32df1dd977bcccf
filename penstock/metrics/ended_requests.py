"""Requests of an API server that have ended, counted by what they have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from penstock.metrics.bounds import E2E_BOUNDS
from penstock.metrics.histogram import Histogram, rebucketed
from penstock.metrics.snapshot import Distribution
from penstock.telemetry.gen_ai_metrics import (
    REQUEST_DURATION,
    TIME_PER_OUTPUT_TOKEN,
    TIME_TO_FIRST_TOKEN,
    TOKEN_USAGE,
    GenAiHistogram,
    Point,
    request_attributes,
)

GOOD = ("stop", "length")
"""Outcomes of requests that succeed."""
MAX_KINDS = 256
"""Kinds of requests that are told apart by model: adapters, which come and go, are models. Those of a further
kind have no model."""
_DURATION_BOUNDS = tuple(sorted({*E2E_BOUNDS, *REQUEST_DURATION.bounds}))
"""Of both metrics that the durations are shown as."""


class RequestKind(NamedTuple):
    api: str
    outcome: str
    model: str


class RequestFigures(NamedTuple):
    """A request. Times are seconds."""

    took: float
    first_token: float | None = None
    """From its arrival to its first token; None: there was none."""
    input: int = 0
    output: int = 0
    longest: int = 0
    """Tokens of its longest choice."""


@dataclass(slots=True)
class _Histograms:
    """Of the requests of one kind. What only an export shows is counted for one alone."""

    durations: Histogram = field(default_factory=lambda: Histogram(_DURATION_BOUNDS))
    exported: dict[tuple[GenAiHistogram, str | None], Histogram] = field(default_factory=dict)
    """By metric and gen_ai.token.type."""

    def add(self, metric: GenAiHistogram, value: float, token_type: str | None = None) -> None:
        key = metric, token_type
        if (histogram := self.exported.get(key)) is None:
            histogram = self.exported[key] = Histogram(metric.bounds)
        histogram.add(value)


class EndedRequests:
    def __init__(self) -> None:
        self._kinds: dict[RequestKind, _Histograms] = {}

    def add(self, kind: RequestKind, took_s: float) -> None:
        """Count a request."""
        self._of(kind).durations.add(took_s)

    def add_exported(self, kind: RequestKind, ended: RequestFigures) -> None:
        """Count what only :meth:`points` show, of a request that has been added."""
        of_kind = self._of(kind)
        if ended.input:
            of_kind.add(TOKEN_USAGE, ended.input, "input")
        if ended.output:
            of_kind.add(TOKEN_USAGE, ended.output, "output")
        if ended.first_token is None or kind.outcome not in GOOD:
            return
        of_kind.add(TIME_TO_FIRST_TOKEN, ended.first_token)
        if ended.longest > 1:
            of_kind.add(TIME_PER_OUTPUT_TOKEN, (ended.took - ended.first_token) / (ended.longest - 1))

    def _of(self, kind: RequestKind) -> _Histograms:
        if (found := self._kinds.get(kind)) is None:
            if len(self._kinds) >= MAX_KINDS and kind.model:
                return self._of(kind._replace(model=""))
            found = self._kinds[kind] = _Histograms()
        return found

    def counts(self) -> Counter[tuple[str, str]]:
        """Requests by API and outcome."""
        found: Counter[tuple[str, str]] = Counter()
        for kind, each in self._kinds.items():
            found[kind.api, kind.outcome] += int(each.durations.counts.sum())
        return found

    def durations(self) -> Distribution:
        """Seconds that requests took, in the buckets of :data:`~penstock.metrics.bounds.E2E_BOUNDS`."""
        counts, total = np.zeros(len(_DURATION_BOUNDS) + 1, np.int64), 0.0
        for each in self._kinds.values():
            counts, total = counts + each.durations.counts, total + each.durations.total
        return Distribution(rebucketed(counts, _DURATION_BOUNDS, E2E_BOUNDS), total)

    def points(self) -> Iterator[Point]:
        """Everything, for an export."""
        for kind, each in list(self._kinds.items()):
            error = None if kind.outcome in GOOD else kind.outcome
            attributes = request_attributes(kind.api, kind.model, kind.model, error)
            if attributes is None:
                continue
            counts = rebucketed(each.durations.counts, _DURATION_BOUNDS, REQUEST_DURATION.bounds)
            yield Point(REQUEST_DURATION, attributes, counts, each.durations.total)
            for (metric, token_type), histogram in list(each.exported.items()):
                told = request_attributes(kind.api, kind.model, kind.model, token_type=token_type) or {}
                yield Point(metric, told, tuple(histogram.counts.tolist()), histogram.total)
