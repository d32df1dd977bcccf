"""The text of ``/metrics`` over all workers."""

from __future__ import annotations

import asyncio
import contextlib
import time

from penstock.gateway.telemetry.metrics import Families, GatewayMetrics
from penstock.gateway.workers.exchange import Exchange, WorkerName
from penstock.gateway.workers.metric_files import MetricFiles
from penstock.metrics.shared_exposition import in_slices

WAIT_S = 1.0
"""Longest wait for the other workers; of one that hangs the latest metrics are shown."""
INTERVAL_S = 1.0
"""Minimum time between two files of a worker, when nobody asks."""
MAX_SHARE = 0.01
"""Share of the time that a worker spends on them at most: with thousands of series it writes less often."""


class WorkerExposition:
    """One worker's part in the metrics of all."""

    def __init__(self, exchange: Exchange, files: MetricFiles, metrics: GatewayMetrics) -> None:
        self._exchange = exchange
        self._files = files
        self._metrics = metrics
        self._question = 0
        self._awaited: set[WorkerName] = set()
        """Siblings that have not answered yet."""
        self._answered = asyncio.Event()
        self._written = 0
        """Ended requests in the file."""
        self._next_at = 0.0
        exchange.on("write metrics", self._on_question)
        exchange.on("metrics written", self._on_answer)
        exchange.on_gone.append(self._on_gone)

    async def text(self) -> bytes:
        """The metrics of all workers as they are now. One call at a time."""
        self._question += 1
        self._answered.clear()
        self._awaited = set(self._exchange.siblings)
        self._exchange.send("write metrics", str(self._question).encode())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                while self._awaited & self._exchange.siblings:
                    await self._answered.wait()
                    self._answered.clear()
        families = await in_slices(self._metrics.families())
        self.write(families)  # what a scraper has seen stays
        others = self._files.read_others(self._exchange.own)
        return b"".join(await in_slices(self._metrics.exposition(others, families)))

    def write(self, families: Families | None = None) -> None:
        """Writes this worker's metrics to its file."""
        began = time.monotonic()
        self._written = self._metrics.ended
        self._files.write(self._exchange.own, self._metrics.shared(families))
        now = time.monotonic()
        self._next_at = now + max(INTERVAL_S, (now - began) / MAX_SHARE)

    def write_when_due(self) -> None:
        """Called often: writes what has changed, so that little is lost if this process is killed."""
        if time.monotonic() >= self._next_at and self._metrics.ended != self._written:
            self.write()

    def _on_question(self, sender: WorkerName, data: bytes) -> None:
        self.write()
        self._exchange.send("metrics written", data, sender)

    def _on_answer(self, sender: WorkerName, data: bytes) -> None:
        if data == str(self._question).encode():
            self._on_gone(sender)

    def _on_gone(self, sibling: WorkerName) -> None:
        self._awaited.discard(sibling)
        self._answered.set()
