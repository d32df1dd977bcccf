"""Sizes, times and tokens of requests: kept as rows, and counted into histograms many at once, by columns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from penstock.gateway import metric_definitions
from penstock.gateway.metric_definitions import Metric
from penstock.gateway.responses.outcome import Outcome
from penstock.metrics.families import MetricKind
from penstock.metrics.histogram import Histogram

KEPT_ROWS = 256
"""Requests of the same labels that are counted at once, at most."""


class RequestLabels(NamedTuple):
    """Label values that distinguish requests; each combination that occurs costs memory forever."""

    model: str
    target_model: str
    api: str
    outcome: Outcome
    status: int
    priority: int
    """Sign of the request's priority."""
    pool: str
    """Pool of the endpoint."""

    def label_values(self) -> dict[str, str]:
        """Values by label name, including labels that only other naming schemes have."""
        named = {name: str(value) for name, value in self._asdict().items()}
        return {**named, "error_code": error_code(self)}


def error_code(key: RequestLabels) -> str:
    """The error code of the endpoint pickers' naming schemes."""
    if key.outcome is Outcome.REJECTED:
        return _REJECTED_CODES.get(key.status, "Unknown")
    return "Unknown" if key.outcome is Outcome.CLIENT_DISCONNECT else "ModelServerError"


_REJECTED_CODES = {
    400: "BadRequest",
    401: "Unauthorized",
    413: "BadRequest",
    429: "ResourceExhausted",
    500: "Internal",
    503: "ServiceUnavailable",
}


class RequestRow(NamedTuple):
    """What is observed of one request; NaN: it is not known."""

    bytes_in: int
    bytes_out: int
    took_s: float
    queued_s: float
    pick_s: float
    output: int
    """Output tokens, or events; 0: there were none."""
    ttft_s: float = math.nan
    streaming_s: float = math.nan
    """From the first token to the last one."""
    input: float = math.nan
    """Input tokens."""
    cached: float = math.nan


class RequestColumns:
    """Histograms of requests by their labels."""

    def __init__(self) -> None:
        self._rows: dict[RequestLabels, list[RequestRow]] = {}
        """Requests that are not in the histograms yet."""
        self._histograms: dict[Metric, dict[RequestLabels, Histogram]] = {
            metric: {} for metric in metric_definitions.METRICS if metric.kind is MetricKind.HISTOGRAM
        }

    def add(self, key: RequestLabels, row: RequestRow) -> None:
        """Observe a request."""
        rows = self._rows.setdefault(key, [])
        rows.append(row)
        if len(rows) >= KEPT_ROWS:
            self._count(key)

    def histogram(self, metric: Metric, key: RequestLabels) -> Histogram:
        """The histogram to which more is added."""
        histograms = self._histograms[metric]
        if (histogram := histograms.get(key)) is None:
            histogram = histograms[key] = Histogram(metric.bounds)
        return histogram

    def histograms(self, metric: Metric) -> Mapping[RequestLabels, Histogram]:
        """The histograms of a metric, with all requests."""
        for key in list(self._rows):
            self._count(key)
        return self._histograms[metric]

    def _count(self, key: RequestLabels) -> None:
        columns = np.array(self._rows.pop(key), np.float64).T
        bytes_in, bytes_out, took_s, queued_s, pick_s, output, ttft_s, streaming_s, prompt, cached = columns
        answered, several = output > 0, (output > 1) & ~np.isnan(streaming_s)
        for metric, values in (
            (metric_definitions.REQUEST_SIZE, bytes_in),
            (metric_definitions.RESPONSE_SIZE, bytes_out),
            (metric_definitions.INPUT_TOKENS, prompt[~np.isnan(prompt)]),
            (metric_definitions.CACHED_TOKENS, cached[~np.isnan(cached)]),
            (metric_definitions.OUTPUT_TOKENS, output[answered]),
            (metric_definitions.DURATION, took_s),
            (metric_definitions.QUEUE_DURATION, queued_s[queued_s > 0]),
            (metric_definitions.PICK, pick_s[pick_s > 0]),
            (metric_definitions.NTPOT, took_s[answered] / output[answered]),
            (metric_definitions.TTFT, ttft_s[~np.isnan(ttft_s)]),
            (metric_definitions.TPOT, streaming_s[several] / (output[several] - 1)),
        ):
            if values.size:
                self.histogram(metric, key).observe(values.copy())
