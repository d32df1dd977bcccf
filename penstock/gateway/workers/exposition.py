"""The text of ``/metrics`` over all workers."""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from penstock.gateway.telemetry.metrics import Families, GatewayMetrics
from penstock.gateway.telemetry.worker_metrics import WorkerMetrics
from penstock.gateway.workers.keeper_link import KeeperLink
from penstock.gateway.workers.kept_metrics import LATEST, OTHERS, REFRESH, REFRESHED, SCRAPE, OthersMetrics
from penstock.gateway.workers.letters import WorkerName
from penstock.http.admission import unavailable
from penstock.logging_setup import RateLimitedLog
from penstock.metrics.shared_exposition import in_slices

_complain = RateLimitedLog(logging.getLogger(__name__))

TIMEOUT_S = 5.0
"""Wait for the keeper, which waits a second for the other workers."""
INTERVAL_S = 1.0
"""Minimum time between two letters with a worker's metrics, when nobody asks."""
MAX_SHARE = 0.01
"""Share of the time that a worker spends on them at most: with thousands of series it sends less often."""

_encode = msgspec.msgpack.Encoder().encode
_part_decoder = msgspec.msgpack.Decoder(OthersMetrics)
_metrics_decoder = msgspec.msgpack.Decoder(WorkerMetrics)


class WorkerExposition:
    """One worker's part in the metrics of all."""

    def __init__(self, link: KeeperLink, metrics: GatewayMetrics, timeout_s: float = TIMEOUT_S) -> None:
        self._link = link
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._question = 0
        self._others: list[WorkerMetrics] = []
        """What has come for the question."""
        self._complete = asyncio.Event()
        self._sent = 0
        """Ended requests in what was sent last."""
        self._next_at = 0.0
        link.on(REFRESH, self._on_refresh)
        link.on(OTHERS, self._on_others)

    async def text(self) -> bytes:
        """The metrics of all workers as they are now. One call at a time. Raises ApiError when the keeper is
        silent: without the others' metrics counters would fall."""
        families = await in_slices(self._metrics.families())
        self.send(families)  # what a scraper has seen stays
        self._question += 1
        self._others = []
        self._complete.clear()
        self._link.ask_keeper(SCRAPE, self._name)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._complete.wait()
        except TimeoutError:
            raise unavailable("The metrics of the gateway's other workers do not come.", "metrics") from None
        return b"".join(await in_slices(self._metrics.exposition(self._others, families)))

    def send(self, families: Families | None = None) -> None:
        """Send this worker's metrics to the keeper."""
        began = time.monotonic()
        self._sent = self._metrics.ended
        self._link.ask_keeper(LATEST, _encode(self._metrics.shared(families)))
        now = time.monotonic()
        self._next_at = now + max(INTERVAL_S, (now - began) / MAX_SHARE)

    def send_when_due(self) -> None:
        """Send what has changed, so that little is lost if this process is killed. Called often."""
        if time.monotonic() >= self._next_at and self._metrics.ended != self._sent:
            self.send()

    @property
    def _name(self) -> bytes:
        """Of the question."""
        return str(self._question).encode()

    def _on_refresh(self, sender: WorkerName | None, data: bytes) -> None:
        self.send()
        self._link.ask_keeper(REFRESHED, data)

    def _on_others(self, sender: WorkerName | None, data: bytes) -> None:
        part = _part_decoder.decode(data)
        if part.question != self._name:
            return
        if part.metrics is None:
            self._complete.set()
            return
        try:
            self._others.append(_metrics_decoder.decode(part.metrics))
        except msgspec.MsgspecError as error:  # of another version
            _complain("others", "metrics of another worker are not understood: %s", error)
