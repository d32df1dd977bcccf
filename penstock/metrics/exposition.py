"""Renders totals in Prometheus' text format, the body of ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, islice
from typing import TYPE_CHECKING

from penstock.metrics.families import METRIC_FAMILIES, MetricFamily, MetricKind
from penstock.metrics.merge import Totals
from penstock.metrics.snapshot import Distribution, Labels, Value

if TYPE_CHECKING:  # imported for the first scrape
    from prometheus_client.metrics_core import Metric

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"


SERIES_AT_ONCE = 32
"""Series of a piece: a histogram's has up to 40 lines, of which each takes some microseconds."""
_HEADER_LINES = 2


def exposition(totals: Totals) -> Iterator[bytes]:
    """All families of :mod:`.families`, including those without a value."""
    return render((family, totals.get(family.name, {})) for family in METRIC_FAMILIES.values())


def render(families: Iterable[tuple[MetricFamily, Mapping[Labels, Value]]]) -> Iterator[bytes]:
    """Render families with their values by labels, in pieces of :data:`SERIES_AT_ONCE` series at most:
    an event loop has others to serve."""
    for family, values in families:
        rest = iter(sorted(values.items()))
        yield _text(family, dict(islice(rest, SERIES_AT_ONCE)))
        while more := dict(islice(rest, SERIES_AT_ONCE)):
            yield _text(family, more).split(b"\n", _HEADER_LINES)[_HEADER_LINES]


def _text(family: MetricFamily, values: Mapping[Labels, Value]) -> bytes:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(_Metrics([_metric(family, values)]))
    return generate_latest(registry)


class _Metrics:
    """A collector, which only has to have this method."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _metric(family: MetricFamily, values: Mapping[Labels, Value]) -> Metric:
    from prometheus_client.metrics_core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    metric: CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
    if family.kind is MetricKind.HISTOGRAM:
        metric = HistogramMetricFamily(family.name, family.help, labels=family.labels)
        bounds = [*(repr(bound) for bound in family.bounds), "+Inf"]
        for labels, value in values.items():
            assert isinstance(value, Distribution)
            cumulative = map(float, accumulate(value.counts))
            metric.add_metric(labels, list(zip(bounds, cumulative, strict=True)), value.total)
        return metric
    kind = CounterMetricFamily if family.kind is MetricKind.COUNTER else GaugeMetricFamily
    metric = kind(family.name, family.help, labels=family.labels)
    for labels, value in values.items():
        assert not isinstance(value, Distribution)
        metric.add_metric(labels, value)
    return metric
