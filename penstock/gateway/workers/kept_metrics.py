"""The keeper's part in the metrics of all workers: the latest of each, and the sum of those that have ended.

A worker sends its metrics about once a second, and whenever another worker is asked for ``/metrics``. When a
worker has ended, what it sent last is added to the sum of those before. So counters never go backwards, and a
scrape that any worker answers is exact: the keeper has the others send theirs first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Set
from dataclasses import dataclass
from itertools import count

import msgspec

from penstock.gateway.telemetry.worker_metrics import WorkerMetrics, add
from penstock.gateway.workers.letters import Letter, WorkerName
from penstock.logging_setup import RateLimitedLog
from penstock.metrics.snapshot import Labels, Series, Value

_complain = RateLimitedLog(logging.getLogger(__name__))

WAIT_S = 1.0
"""Longest wait for the other workers; of one that hangs the latest metrics are shown."""
MAX_ENDED_SERIES = 20_000
"""Series in the sum of the workers that have ended; those for which there is no room are left out."""
LATEST, SCRAPE, REFRESH, REFRESHED, OTHERS = (
    "metrics",
    "metrics of all",
    "refresh metrics",
    "metrics refreshed",
    "metrics of others",
)


class OthersMetrics(msgspec.Struct, array_like=True, frozen=True):
    """A part of the answer to a scrape."""

    question: bytes
    """What the worker that is scraped has sent."""
    metrics: bytes | None = None
    """:class:`WorkerMetrics` of one worker, or of all that have ended; None: that was all."""


@dataclass(slots=True, eq=False)
class _Scrape:
    """A worker was asked for the metrics of all."""

    asker: WorkerName
    question: bytes
    awaited: set[WorkerName]
    """Workers whose metrics are to come."""
    deadline: float


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(WorkerMetrics)


class MetricsKeeper:
    """``present`` are the workers that take letters, as they are at any time."""

    def __init__(
        self,
        send: Callable[[WorkerName, Letter], bool],
        present: Set[WorkerName],
        clock: Callable[[], float],
    ) -> None:
        self.handlers = {LATEST: self._on_latest, SCRAPE: self._on_scrape, REFRESHED: self._on_refreshed}
        self._send = send
        self._present = present
        self._clock = clock
        self._latest: dict[WorkerName, bytes] = {}
        self._ended: dict[tuple[str, Labels], Value] = {}
        """The sum of the workers that have ended, by family and labels."""
        self._numbers = count(1)
        self._scrapes: dict[bytes, _Scrape] = {}
        """Those that are not answered yet."""

    def wait_s(self) -> float | None:
        """Time until :meth:`answer_late` has something to do; None: for ever."""
        deadlines = [scrape.deadline for scrape in self._scrapes.values()]
        return max(0.0, min(deadlines) - self._clock()) if deadlines else None

    def answer_late(self) -> None:
        """Answer the scrapes that have waited long enough."""
        for number, scrape in list(self._scrapes.items()):
            if scrape.deadline <= self._clock():
                self._answer(number)

    def forget(self, worker: WorkerName) -> None:
        """The worker has ended: what it counted stays, its gauges go."""
        try:
            metrics = _decoder.decode(self._latest.pop(worker, _encode(WorkerMetrics([], []))))
            for each in metrics.counted:
                key = each.family, each.labels
                if key in self._ended:
                    self._ended[key] = add(self._ended[key], each.value)
                elif len(self._ended) < MAX_ENDED_SERIES:
                    self._ended[key] = each.value
        except msgspec.MsgspecError as error:
            _complain("ended", "metrics of worker %s are lost: %s", worker, error)
        for number, scrape in list(self._scrapes.items()):
            if scrape.asker == worker:
                del self._scrapes[number]
            else:
                self._arrived(number, worker)

    def _on_latest(self, sender: WorkerName, data: bytes) -> None:
        self._latest[sender] = data

    def _on_scrape(self, sender: WorkerName, data: bytes) -> None:
        number = str(next(self._numbers)).encode()
        others = set(self._present - {sender})
        self._scrapes[number] = _Scrape(sender, data, others, self._clock() + WAIT_S)
        for worker in others:
            self._send(worker, Letter(REFRESH, number))
        if not others:
            self._answer(number)

    def _on_refreshed(self, sender: WorkerName, data: bytes) -> None:
        self._arrived(data, sender)

    def _arrived(self, number: bytes, worker: WorkerName) -> None:
        scrape = self._scrapes.get(number)
        if scrape is not None:
            scrape.awaited.discard(worker)
            if not scrape.awaited:
                self._answer(number)

    def _answer(self, number: bytes) -> None:
        scrape = self._scrapes.pop(number)
        ended = WorkerMetrics([Series(*key, value) for key, value in self._ended.items()], [])
        found = [data for worker, data in self._latest.items() if worker != scrape.asker]
        for metrics in (*found, _encode(ended), None):
            part = OthersMetrics(scrape.question, metrics)
            if not self._send(scrape.asker, Letter(OTHERS, _encode(part))):
                return
