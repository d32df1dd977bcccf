"""Metrics for an OpenTelemetry collector, sent by a thread that nothing waits for.

The process counts for itself; at an interval the event loop takes what it has counted, and the thread sends
it. Everything is cumulative since the start of the process, so that what a collector does not take is part of
what is sent next, and only the latest is kept.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING

from penstock import __version__
from penstock.logging_setup import RateLimitedLog
from penstock.telemetry.gen_ai_metrics import GenAiHistogram, Point, added_up
from penstock.telemetry.spans import CLOSE_S, Attribute

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import Metric, MetricExporter, MetricsData
    from opentelemetry.sdk.resources import Resource

log = logging.getLogger(__name__)
_warn = RateLimitedLog(log)

POINTS_PER_TURN = 64
"""Points that are taken in one turn of the event loop: some milliseconds."""


class MetricExport:
    """Exports what ``collect`` yields. Its thread runs from construction to :meth:`close`."""

    def __init__(
        self,
        exporter: MetricExporter,
        resource: Resource,
        scope: str,
        collect: Callable[[], Iterable[Point]],
        interval_s: float,
        common: dict[str, Attribute],
    ) -> None:
        """``collect`` is called on the event loop. ``common``: attributes of all points."""
        self._exporter = exporter
        self._resource = resource
        self._scope = scope
        self._collect = collect
        self._interval_s = interval_s
        self._common = common
        self._began_ns = time.time_ns()
        self._latest: list[Point] | None = None
        self._wake = threading.Event()
        self._close_by: float | None = None
        """Time of the monotonic clock; None: it goes on."""
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    async def run(self) -> None:
        """Offer what has been counted at every interval, until it is cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                self._offer([point async for point in self._in_turns()])
            except Exception as error:  # noqa: BLE001 - requests are served on
                _warn("collect", "metrics were not collected: %s", error)

    async def _in_turns(self) -> AsyncIterator[Point]:
        for number, point in enumerate(self._collect(), 1):
            yield point
            if number % POINTS_PER_TURN == 0:
                await asyncio.sleep(0)

    def _offer(self, points: list[Point]) -> None:
        self._latest = points
        self._wake.set()

    def finish(self) -> None:
        """Have the thread send the last of it, and then end. Does not wait."""
        self._close_by = time.monotonic() + CLOSE_S
        self._offer(list(self._collect()))

    def close(self) -> None:
        """Wait until that is sent, for at most :data:`CLOSE_S` seconds after :meth:`finish`."""
        assert self._close_by is not None, "finish() comes first"
        self._thread.join(max(0.0, self._close_by - time.monotonic()))
        if self._thread.is_alive():
            log.warning("the last metrics were not exported: the collector does not answer")
        self._exporter.shutdown()

    # -- the thread

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            ends = self._close_by is not None
            points, self._latest = self._latest, None
            if points:
                self._send(points)
            if ends:
                return

    def _send(self, points: list[Point]) -> None:
        try:
            self._exporter.export(self._data(points))
        except Exception as error:  # noqa: BLE001 - whatever a library raises, the next export comes
            _warn("export", "metrics were not exported: %s", error)

    def _data(self, points: list[Point]) -> MetricsData:
        from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        now = time.time_ns()
        metrics = [_metric(*each, self._common, self._began_ns, now) for each in added_up(points).items()]
        scope = ScopeMetrics(InstrumentationScope(self._scope, __version__), metrics, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])


def _metric(
    metric: GenAiHistogram, points: list[Point], common: dict[str, Attribute], began_ns: int, now_ns: int
) -> Metric:
    from opentelemetry.sdk.metrics.export import AggregationTemporality, Histogram, HistogramDataPoint, Metric

    made = [
        HistogramDataPoint(
            attributes=common | point.attributes,
            start_time_unix_nano=began_ns,
            time_unix_nano=now_ns,
            count=sum(point.counts),
            sum=point.total,
            bucket_counts=point.counts,
            explicit_bounds=metric.bounds,
            # Not known; a missing value is allowed by the protocol, if not by the class.
            min=None,  # type: ignore[arg-type]
            max=None,  # type: ignore[arg-type]
        )
        for point in points
    ]
    return Metric(metric.name, metric.help, metric.unit, Histogram(made, AggregationTemporality.CUMULATIVE))
