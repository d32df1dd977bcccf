"""Totals as the text of ``/metrics``."""

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from .families import FAMILIES, Family, Kind
from .snapshot import Distribution, Labels, Totals, Value

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"


def exposition(totals: Totals) -> bytes:
    """Every family of :mod:`.families`, those without a value as well."""
    registry = CollectorRegistry()
    registry.register(_Totals(totals))
    return generate_latest(registry)


class _Totals(Collector):
    def __init__(self, totals: Totals) -> None:
        self._totals = totals

    def collect(self) -> Iterator[Metric]:
        for family in FAMILIES.values():
            yield _metric(family, self._totals.get(family.name, {}))


def _metric(family: Family, values: dict[Labels, Value]) -> Metric:
    metric: CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
    if family.kind is Kind.HISTOGRAM:
        metric = HistogramMetricFamily(family.name, family.help, labels=family.labels)
        bounds = [*(repr(bound) for bound in family.bounds), "+Inf"]
        for labels, value in sorted(values.items()):
            assert isinstance(value, Distribution)
            cumulative = map(float, accumulate(value.counts))
            metric.add_metric(labels, list(zip(bounds, cumulative, strict=True)), value.total)
        return metric
    kind = CounterMetricFamily if family.kind is Kind.COUNTER else GaugeMetricFamily
    metric = kind(family.name, family.help, labels=family.labels)
    for labels, value in sorted(values.items()):
        assert not isinstance(value, Distribution)
        metric.add_metric(labels, value)
    return metric
