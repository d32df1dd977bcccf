"""The text of ``/metrics`` over all workers.

A worker sends its metrics to the keeper about once a second, and whenever another one is asked for the text.
So a scrape that any worker answers is exact, and little is lost with a worker that is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from itertools import count

import msgspec

from penstock.gateway.telemetry.metrics import Families, GatewayMetrics
from penstock.gateway.telemetry.worker_metrics import WorkerMetrics
from penstock.gateway.workers.keeper_link import KeeperLink
from penstock.gateway.workers.kept_metrics import ANSWER, LATEST, QUESTION, OthersMetrics
from penstock.gateway.workers.letters import WorkerName
from penstock.http.admission import unavailable
from penstock.logging_setup import RateLimitedLog
from penstock.metrics.shared_exposition import in_slices

_warn = RateLimitedLog(logging.getLogger(__name__))

WAIT_S = 1.0
"""Longest wait for the other workers; of one that hangs the latest metrics are shown."""
KEEPER_WAIT_S = 5.0
"""Longest wait for the keeper."""
INTERVAL_S = 1.0
"""Minimum time between two letters with a worker's metrics, when nobody asks."""
MAX_SHARE = 0.01
"""Share of the time that a worker spends on them at most: with thousands of series it sends less often."""
REFRESH, REFRESHED = "refresh metrics", "metrics refreshed"

_encode = msgspec.msgpack.Encoder().encode
_answer_decoder = msgspec.msgpack.Decoder(OthersMetrics)
_metrics_decoder = msgspec.msgpack.Decoder(WorkerMetrics)


class WorkerExposition:
    """One worker's part in the metrics of all."""

    def __init__(self, link: KeeperLink, metrics: GatewayMetrics) -> None:
        self._link = link
        self._metrics = metrics
        self._questions = count()
        self._question = b""
        self._awaited: set[WorkerName] = set()
        """Siblings that have not sent their metrics to the keeper yet."""
        self._others: list[WorkerMetrics] = []
        """What the keeper has answered so far."""
        self._complete = False
        """The metrics of all siblings have come."""
        self._news = asyncio.Event()
        self._sent = 0
        """Ended requests in what was sent last."""
        self._next_at = 0.0
        link.on(REFRESH, self._on_refresh)
        link.on(REFRESHED, self._on_refreshed)
        link.on(ANSWER, self._on_answer)
        link.on_gone.append(lambda sibling: self._news.set())

    async def text(self) -> bytes:
        """The metrics of all workers as they are now. One call at a time. Raises ApiError when the keeper is
        silent: without what it has counters would fall."""
        self._question = str(next(self._questions)).encode()
        self._awaited, self._others, self._complete = set(self._link.siblings), [], False
        self._link.tell_others(REFRESH, self._question)
        await self._wait(lambda: not self._awaited & self._link.siblings, WAIT_S)
        families = await in_slices(self._metrics.families())
        self.send(families)  # what a scraper has seen stays
        self._link.ask_keeper(QUESTION, self._question)
        if not await self._wait(lambda: self._complete, KEEPER_WAIT_S):
            raise unavailable("The metrics of the gateway's other workers do not come.", "metrics")
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

    async def _wait(self, done: Callable[[], bool], limit_s: float) -> bool:
        """Wait until ``done``, but not for longer than ``limit_s``. Returns whether it is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not done():
                    self._news.clear()
                    await self._news.wait()
        return done()

    def _on_refresh(self, caller: WorkerName | None, data: bytes) -> None:
        self.send()
        self._link.tell_others(REFRESHED, data, caller)

    def _on_refreshed(self, caller: WorkerName | None, data: bytes) -> None:
        if data == self._question and caller is not None:
            self._awaited.discard(caller)
            self._news.set()

    def _on_answer(self, caller: WorkerName | None, data: bytes) -> None:
        answer = _answer_decoder.decode(data)
        if answer.question != self._question:
            return
        if answer.metrics is None:
            self._complete = True
            self._news.set()
            return
        try:
            self._others.append(_metrics_decoder.decode(answer.metrics))
        except msgspec.MsgspecError as error:  # of another version
            _warn("others", "metrics of another worker are not understood: %s", error)
