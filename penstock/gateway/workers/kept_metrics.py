"""The keeper's part in the metrics of all workers: the latest of each, and the sum of those that have ended.

When a worker has ended, what it sent last is added to the sum of those before. So counters never go
backwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from penstock.gateway.telemetry.worker_metrics import WorkerMetrics, add
from penstock.gateway.workers.letters import Letter, WorkerName
from penstock.logging_setup import RateLimitedLog
from penstock.metrics.snapshot import Labels, Series, Value

_warn = RateLimitedLog(logging.getLogger(__name__))

MAX_ENDED_SERIES = 20_000
"""Series in the sum of the workers that have ended; those for which there is no room are left out."""
LATEST, QUESTION, ANSWER = "latest metrics", "metrics question", "metrics answer"


class OthersMetrics(msgspec.Struct, array_like=True, frozen=True):
    """A part of the answer to a question."""

    question: bytes
    """What the worker that asks has sent."""
    metrics: bytes | None = None
    """:class:`WorkerMetrics` of one worker, or of all that have ended; None: that was all."""


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(WorkerMetrics)


class MetricsKeeper:
    """``send`` sends a letter to a worker."""

    def __init__(self, send: Callable[[WorkerName, Letter], bool]) -> None:
        self.handlers = {LATEST: self._on_latest, QUESTION: self._on_question}
        self._send = send
        self._latest: dict[WorkerName, bytes] = {}
        self._ended: dict[tuple[str, Labels], Value] = {}
        """The sum of the workers that have ended, by family and labels."""

    def forget(self, worker: WorkerName) -> None:
        """The worker has ended: what it counted stays, its gauges go."""
        if (latest := self._latest.pop(worker, None)) is None:
            return
        try:
            metrics = _decoder.decode(latest)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            _warn("ended", "metrics of worker %s are lost: %s", worker, error)
            return
        for each in metrics.counted:
            key = each.family, each.labels
            if key in self._ended:
                self._ended[key] = add(self._ended[key], each.value)
            elif len(self._ended) < MAX_ENDED_SERIES:
                self._ended[key] = each.value

    def _on_latest(self, caller: WorkerName, data: bytes) -> None:
        self._latest[caller] = data

    def _on_question(self, caller: WorkerName, data: bytes) -> None:
        ended = WorkerMetrics([Series(*key, value) for key, value in self._ended.items()], [])
        found = [latest for worker, latest in self._latest.items() if worker != caller]
        for metrics in (*found, _encode(ended), None):
            if not self._send(caller, Letter(ANSWER, _encode(OthersMetrics(data, metrics)))):
                return  # it must not show less than there is
