"""Sends snapshots of an engine's metrics to its API servers: once a second, and on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import msgspec

from penstock.engine.base import Engine
from penstock.engine.loop.identity import EngineIdentity
from penstock.engine.loop.publisher import Publisher
from penstock.engine.loop.stats import EngineStats
from penstock.metrics.families import (
    KEPT_PROMPT_BYTES,
    KEPT_PROMPT_HITS,
    KEPT_PROMPT_MISSES,
    SLEEP_STATE,
)
from penstock.metrics.gc_policy import GarbageCollector
from penstock.metrics.snapshot import Series, Snapshot, encode_snapshot, process_name, process_series
from penstock.wire.messages import EngineMetrics, EngineMetricsQuery

REPORT_INTERVAL_S = 1.0
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""Values of the label ``sleep_state``, by sleep level."""


class MetricsReporter:
    """Builds a snapshot when one is due, and sends it through the publisher."""

    def __init__(
        self,
        engine: Engine,
        publisher: Publisher,
        stats: EngineStats,
        collector: GarbageCollector | None,
        identity: EngineIdentity,
        *,
        sleep_level: Callable[[], int] = lambda: 0,
        spans: Mapping[str, int] | None = None,
    ) -> None:
        """``spans``: their numbers by state."""
        self._engine = engine
        self._stats = stats
        self._collector = collector
        self._publisher = publisher
        self._process = process_name("engine", identity.rank)
        self._epoch = identity.epoch
        self._incarnation = identity.incarnation
        self._labels = identity.model, str(identity.rank)
        self._sequence = 0
        self._reported = 0, 0
        """``stats.changes`` and ``attach_count`` of the peers at the last report."""
        self._next = 0.0
        self._sleep_level = sleep_level
        self._spans = spans
        self._queries: dict[int, int] = {}
        """Numbers of the unanswered queries, by API server."""

    @property
    def pending(self) -> bool:
        """Whether metrics have changed since the last report."""
        return self._reported[0] != self._stats.changes

    @property
    def has_new_server(self) -> bool:
        """Whether an API server has connected since the last report."""
        return self._reported[1] != self._publisher.peers.attach_count

    def report_if_due(self, now: float) -> None:
        """:meth:`report` if metrics have changed and the last report is REPORT_INTERVAL_S old."""
        if now >= self._next and self.pending:
            self.report(now)

    def report(self, now: float) -> None:
        """Send a snapshot to every API server without a backlog. Snapshots are cumulative, so the next one
        makes up for a missed one."""
        self._next = now + REPORT_INTERVAL_S
        self._reported = self._stats.changes, self._publisher.peers.attach_count
        self._publisher.offer_to_all(self._message())

    def on_query(self, server: int, query: EngineMetricsQuery) -> None:
        """An API server wants the metrics; :meth:`answer_queries` sends them."""
        self._queries[server] = query.number

    def answer_queries(self) -> None:
        """To be called after each step, which may end aborted streams, and before the engine waits."""
        if self._queries:
            message = self._message()
            for server, number in self._queries.items():
                self._publisher.send(server, msgspec.structs.replace(message, query=number))
            self._queries.clear()

    def _message(self) -> EngineMetrics:
        self._sequence += 1
        snapshot = Snapshot(
            process=self._process,
            epoch=self._epoch,
            sequence=self._sequence,
            series=list(self._series()),
            incarnation=self._incarnation,
        )
        load = self._engine.load()
        return EngineMetrics(
            encode_snapshot(snapshot), load.waiting, load.running, load.kv_used, load.deferred
        )

    def _series(self) -> Iterator[Series]:
        yield from self._stats.series(self._engine.metrics(), *self._labels)
        prompts = self._publisher.peers.prompts
        yield Series(KEPT_PROMPT_HITS.name, self._labels, prompts.hits)
        yield Series(KEPT_PROMPT_MISSES.name, self._labels, prompts.misses)
        yield Series(KEPT_PROMPT_BYTES.name, self._labels, prompts.bytes)
        level = self._sleep_level()
        for number, state in enumerate(SLEEP_STATES):
            yield Series(SLEEP_STATE.name, (*self._labels, state), float(number == level))
        pauses = None if self._collector is None else self._collector.pauses
        yield from process_series(self._process, self._epoch, pauses, self._spans)
