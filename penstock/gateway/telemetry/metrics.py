"""The gateway's metrics: every request is counted once, with its outcome."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from statistics import fmean
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.gateway import metric_definitions
from penstock.gateway.billing.prices import NANO
from penstock.gateway.metric_definitions import Figure, Metric, NamingScheme
from penstock.gateway.requests.bounded_name import bounded_name
from penstock.gateway.responses.outcome import SUCCESSFUL, Outcome
from penstock.gateway.responses.request_record import RequestRecord
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.telemetry.request_columns import RequestColumns, RequestLabels, RequestRow
from penstock.gateway.telemetry.worker_metrics import WorkerMetrics, summed
from penstock.metrics.exposition import render
from penstock.metrics.families import MetricFamily, MetricKind
from penstock.metrics.histogram import Histogram
from penstock.metrics.snapshot import Distribution, Labels, Series, Value
from penstock.telemetry.gen_ai_metrics import (
    TIME_PER_OUTPUT_TOKEN,
    TIME_TO_FIRST_TOKEN,
    Point,
    request_attributes,
)

OTHER = "other"
MAX_LABEL = 128
"""Characters of a label's value."""
_TOKEN_TYPES = {metric_definitions.INPUT_TOKENS: "input", metric_definitions.OUTPUT_TOKENS: "output"}
MAX_LISTED = 1024
"""Pairs of models that endpoints list: an endpoint that lists ever more of them is bounded, too."""
Families = Iterable[tuple[Metric, MetricFamily, Mapping[Labels, Value]]]


@dataclass(frozen=True, slots=True)
class ExpositionLimits:
    """How metrics are exposed."""

    compat: Literal["none", "llm-d", "gie"] = "none"
    """The naming scheme exposed in addition to our own."""
    most_models: int = 64
    """Pairs of a model and its rewritten model with their own series. Clients can invent names, and each
    would cost memory forever: pairs beyond this number are :data:`OTHER`."""
    pool: str = "penstock"
    """Name of the pool of the endpoints that are in none."""


def _known_status(status: int) -> int:
    """``status``, or the first of its class if it is none that is registered: servers can make some up."""
    return status if status in _STATUSES or not status else status // 100 * 100


_STATUSES = frozenset(HTTPStatus)


class GatewayMetrics:
    """Metrics of requests and endpoints. Latencies of all requests are recorded, with their outcome."""

    def __init__(
        self,
        endpoints: Callable[[], list[Endpoint]],
        options: ExpositionLimits | None = None,
        listed_name: Callable[[str], str | None] = lambda name: None,
    ) -> None:
        """``listed_name``: the name or pattern by which a model is configured, or listed by endpoints; empty:
        others are, and it is not; None: none is."""
        self.sources: list[Callable[[], Iterable[Figure]]] = []
        """Parts of the gateway that count for themselves."""
        self._endpoints = endpoints
        self._options = options or ExpositionLimits()
        self._schemes: list[NamingScheme] = ["own"]
        if self._options.compat != "none":
            self._schemes.append(self._options.compat)
        self._listed_name = listed_name
        self._models = {(OTHER, OTHER)}
        self._listed: set[tuple[str, str]] = set()
        """Pairs that endpoints list, among those with series of their own."""
        self._most_models = len(self._models) + self._options.most_models
        self._running: set[RequestRecord] = set()
        self._requests: Counter[RequestLabels] = Counter()
        self._columns = RequestColumns()
        self._tokens: Counter[Labels] = Counter()
        self._rejections: Counter[str] = Counter()
        self._key_requests: Counter[Labels] = Counter()
        self._key_tokens: Counter[Labels] = Counter()
        self._costs: Counter[Labels] = Counter()
        self._key_costs: Counter[Labels] = Counter()
        self._retries = 0
        self._fallbacks: Counter[tuple[str, str]] = Counter()
        self._pools: set[str] = set()

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return len(self._running)

    @property
    def in_flight(self) -> Iterable[RequestRecord]:
        return self._running

    def add_models(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Pairs of a name and a model that it stands for, of the configuration: they always have series."""
        more = set(pairs) - self._models
        self._models |= more
        self._most_models += len(more)

    def set_pools(self, names: Iterable[str]) -> None:
        """Pools that have series also without an endpoint."""
        self._pools = set(names)

    # -- requests

    def request_started(self, record: RequestRecord) -> None:
        """A request has arrived."""
        self._running.add(record)

    def release(self, record: RequestRecord) -> None:
        """The request is no longer in flight; its outcome may come later."""
        self._running.discard(record)

    def request_ended(self, record: RequestRecord) -> None:
        """A request has ended with an outcome."""
        self._running.discard(record)
        model, target_model = self._model_labels(record)
        priority = (record.priority > 0) - (record.priority < 0)
        status = _known_status(record.status)
        pool = record.pool or self._options.pool
        key = RequestLabels(model, target_model, record.api, record.outcome, status, priority, pool)
        self._requests[key] += 1
        if record.fell_back:
            self._fallbacks[model, target_model] += 1
        if record.outcome is Outcome.REJECTED:
            self._rejections[record.reason] += 1
        if name := record.caller.label or record.caller.name:
            self._key_requests[name, str(record.outcome)] += 1
        if record.cost is not None:
            self._count_cost(record, key, record.cost)
        self._retries += max(0, record.attempts - 1)
        self._columns.add(key, self._row(record, key))

    def _row(self, record: RequestRecord, key: RequestLabels) -> RequestRow:
        """What is observed of the request; its tokens are counted."""
        seen, took_s = record.seen, record.ended_at - record.began_at
        sizes_and_times = record.bytes_in, record.bytes_out, took_s, record.queued_s, record.pick_s
        if record.is_replay:  # the tokens of a stored response were counted before
            return RequestRow(*sizes_and_times, 0)
        output, prompt, cached = self._count_tokens(record, key)
        first, last = seen.first_token_at, seen.last_token_at
        if first is None or last is None:
            return RequestRow(*sizes_and_times, output, input=prompt, cached=cached)
        if seen.token_events > 1:
            self._columns.histogram(metric_definitions.ITL, key).merge(seen.itl_bucket_counts, last - first)
        return RequestRow(*sizes_and_times, output, first - record.began_at, last - first, prompt, cached)

    def _count_tokens(self, record: RequestRecord, key: RequestLabels) -> tuple[int, float, float]:
        """Count tokens; returns those of the output, which are the events where the server did not count
        them, of the input, and the cached ones of it."""
        counts = record.seen.tokens
        for kind, count in zip(counts._fields, counts, strict=True):
            if count or (count is not None and kind != "output"):
                counted = kind == "output" and record.seen.reported_output is None
                self._count(record, key, kind, count, "events" if counted else "usage")
        prompt, cached = (math.nan if count is None else count for count in (counts.input, counts.cached))
        return counts.output or 0, prompt, cached

    def _count(self, record: RequestRecord, key: RequestLabels, kind: str, count: int, source: str) -> None:
        self._tokens[key.model, key.target_model, key.api, kind, source] += count
        if name := record.caller.label or record.caller.name:
            self._key_tokens[name, kind] += count

    def _count_cost(self, record: RequestRecord, key: RequestLabels, cost: int) -> None:
        """In whole billionths, so that the sums are exact."""
        self._costs[key.model, key.target_model, key.pool, record.currency] += cost
        caller = record.caller
        if name := caller.label or caller.name:
            self._key_costs[name, "" if caller.label else caller.team, record.currency] += cost

    def _model_labels(self, record: RequestRecord) -> tuple[str, str]:
        """Model and rewritten model, or :data:`OTHER` twice. Who names models that nobody lists takes no
        series of those that somebody does."""
        if (pair := self._known_pair(record)) is not None:
            return pair
        too_many = len(self._models) >= self._most_models
        unlisted = "" in map(self._listed_name, filter(None, (record.model, record.target_model)))
        if record.outcome not in SUCCESSFUL or too_many or unlisted:
            return OTHER, OTHER
        pair = record.model, record.target_model
        self._models.add(pair)
        return pair

    def _known_pair(self, record: RequestRecord) -> tuple[str, str] | None:
        """Model and rewritten model, as they are listed; None: they have no series."""
        pair = record.model, record.target_model
        model = target = self._listed_name(record.model)
        if record.target_model != record.model:
            target = self._listed_name(record.target_model)
        if model and target:
            pair = model, target
            if pair not in self._models and len(self._listed) < MAX_LISTED:
                self.add_models([pair])
                self._listed.add(pair)
        return pair if pair in self._models else None

    # -- exposition

    def exposition(
        self, others: Iterable[WorkerMetrics] = (), families: Families | None = None
    ) -> Iterator[bytes]:
        """The text of ``/metrics`` in pieces, with the metrics of ``others`` added. ``families``: those of
        :meth:`families`."""
        further: dict[str, list[Series]] = defaultdict(list)
        for worker in others:
            for each in (*worker.counted, *worker.gauges):
                further[each.family].append(each)
        return render(
            (family, values if metric.of_host else summed(values, further[family.name]))
            for metric, family, values in families or self.families()
        )

    def shared(self, families: Families | None = None) -> WorkerMetrics:
        """What other workers add to theirs."""
        counted: list[Series] = []
        gauges: list[Series] = []
        for metric, family, values in families or self.families():
            if not metric.of_host:
                series = gauges if metric.kind is MetricKind.GAUGE else counted
                series += [Series(family.name, labels, value) for labels, value in values.items()]
        return WorkerMetrics(counted, gauges)

    def points(self) -> Iterator[Point]:
        """What is exported of this worker's requests."""
        for metric in metric_definitions.METRICS:
            if metric.exported is None:
                continue
            of_successful_alone = metric.exported in (TIME_TO_FIRST_TOKEN, TIME_PER_OUTPUT_TOKEN)
            token_type = _TOKEN_TYPES.get(metric)
            for labels, value in _distributions(metric, "otel", self._columns.histograms(metric)).items():
                model, target_model, api, outcome = labels
                failed = outcome not in SUCCESSFUL
                if of_successful_alone and failed:
                    continue
                error = outcome if failed and metric is metric_definitions.DURATION else None
                if model == OTHER:
                    model = target_model = ""
                told = request_attributes(api, model, target_model, error, token_type)
                if told is not None:
                    yield Point(metric.exported, told, value.counts, value.total)

    @property
    def ended(self) -> int:
        """Requests that have ended."""
        return self._requests.total()

    def families(self) -> Iterator[tuple[Metric, MetricFamily, Mapping[Labels, Value]]]:
        """All metrics as they are now, one after the other."""
        values = _Values(self._options.pool)
        self._export_requests(values)
        self._export_endpoints(values)
        for source in self.sources:
            for metric, value, label_values in source():
                values.add(metric, value, label_values)
        for scheme in self._schemes:
            for metric in metric_definitions.METRICS:
                family = metric.family(scheme)
                if family is None:
                    continue
                if metric.kind is MetricKind.HISTOGRAM:
                    yield metric, family, _distributions(metric, scheme, self._columns.histograms(metric))
                else:
                    yield metric, family, values.of(metric, family)

    def _export_requests(self, values: _Values) -> None:
        for key, count in self._requests.items():
            values.add(metric_definitions.REQUESTS, count, key.label_values())
            if key.outcome not in SUCCESSFUL:
                values.add(metric_definitions.ERRORS, count, key.label_values())
        pairs = Counter(self._known_pair(each) or (OTHER, OTHER) for each in self._running)
        for model, target_model in sorted(self._models):
            label_values = {"model": model, "target_model": target_model, "priority": "0"}
            values.add(metric_definitions.RUNNING, pairs[model, target_model], label_values)
        for labels, count in self._tokens.items():
            label_names = metric_definitions.TOKENS.names["own"].labels
            values.add(metric_definitions.TOKENS, count, dict(zip(label_names, labels, strict=True)))
        for reason, count in self._rejections.items():
            values.add(metric_definitions.REJECTIONS, count, {"reason": reason})
        for metric, counts in (
            (metric_definitions.KEY_REQUESTS, self._key_requests),
            (metric_definitions.KEY_TOKENS, self._key_tokens),
        ):
            for labels, count in counts.items():
                values.add(metric, count, dict(zip(metric.names["own"].labels, labels, strict=True)))
        for metric, costs in (
            (metric_definitions.COST, self._costs),
            (metric_definitions.KEY_COST, self._key_costs),
        ):
            for labels, cost in costs.items():
                values.add(metric, cost / NANO, dict(zip(metric.names["own"].labels, labels, strict=True)))
        values.add(metric_definitions.RETRIES, self._retries)
        for (model, target_model), count in self._fallbacks.items():
            values.add(metric_definitions.FALLBACKS, count, {"model": model, "target_model": target_model})

    def _export_endpoints(self, values: _Values) -> None:
        endpoints = self._endpoints()
        for endpoint in endpoints:
            named = {"endpoint": endpoint.url, "pool": endpoint.pool or self._options.pool}
            values.add(metric_definitions.ENDPOINT_IN_FLIGHT, endpoint.own_in_flight, named)
            values.add(metric_definitions.ENDPOINT_UP, endpoint.is_up, named)
            if endpoint.drained:
                values.add(metric_definitions.ENDPOINT_DRAINED, 1, named)
            if endpoint.held:
                values.add(metric_definitions.ENDPOINT_HELD, 1, named | {"reason": endpoint.held})
            if (load := endpoint.reported_load) is not None:
                values.add(metric_definitions.ENDPOINT_WAITING, load.waiting, named)
                values.add(metric_definitions.ENDPOINT_RUNNING, load.running, named)
                values.add(metric_definitions.ENDPOINT_KV_USED, load.kv_used, named)
        names = self._pools | {endpoint.pool for endpoint in endpoints}
        for name in sorted(names or {""}):
            up = [each for each in endpoints if each.pool == name and each.is_up and not each.drained]
            pool = {"pool": name or self._options.pool}
            values.add(metric_definitions.READY, len(up), pool)
            if loads := [load for each in up if (load := each.reported_load) is not None]:
                values.add(metric_definitions.AVERAGE_KV_USED, fmean(load.kv_used for load in loads), pool)
                values.add(metric_definitions.AVERAGE_WAITING, fmean(load.waiting for load in loads), pool)
                values.add(metric_definitions.AVERAGE_RUNNING, fmean(load.running for load in loads), pool)


class _Values:
    """Values of counters and gauges for one exposition, with the values of all labels of all naming
    schemes."""

    def __init__(self, pool: str) -> None:
        self._constant = {**metric_definitions.CONSTANT_LABELS, "pool": pool}
        self._values: dict[Metric, list[tuple[float, dict[str, str]]]] = defaultdict(list)

    def add(self, metric: Metric, value: float, label_values: dict[str, str] | None = None) -> None:
        self._values[metric].append((float(value), {**self._constant, **(label_values or {})}))

    def of(self, metric: Metric, family: MetricFamily) -> dict[Labels, float]:
        """Values by the labels of ``family``; those with equal labels are summed."""
        totals: dict[Labels, float] = defaultdict(float)
        for value, label_values in self._values[metric]:
            totals[_labels(family.labels, label_values)] += value
        return totals


def _distributions(
    metric: Metric, scheme: NamingScheme, histograms: Mapping[RequestLabels, Histogram]
) -> dict[Labels, Distribution]:
    """Distributions by the labels of the naming scheme, in its buckets."""
    labels, starts = metric.names[scheme].labels, metric.first_buckets(scheme)
    sums: dict[Labels, tuple[NDArray[np.int64], float]] = {}
    for key, histogram in histograms.items():
        series = _labels_of(labels, key)
        counts, total = np.add.reduceat(histogram.counts, starts), histogram.total
        if (before := sums.get(series)) is not None:
            counts, total = before[0] + counts, before[1] + total
        sums[series] = counts, total
    return {series: Distribution(tuple(counts.tolist()), total) for series, (counts, total) in sums.items()}


@lru_cache(1 << 14)
def _labels_of(labels: tuple[str, ...], key: RequestLabels) -> Labels:
    return _labels(labels, {**metric_definitions.CONSTANT_LABELS, **key.label_values()})


def _labels(labels: tuple[str, ...], label_values: Mapping[str, Any]) -> Labels:
    found = (label_values[metric_definitions.LABEL_ALIASES.get(label, label)] for label in labels)
    return tuple(bounded_name(str(value), MAX_LABEL) for value in found)
