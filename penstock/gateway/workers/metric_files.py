"""Metrics of all workers together, those that have ended included.

Each start of a worker has a file in the run directory with its metrics. It writes it about once a second,
and whenever another worker is asked for ``/metrics``. When a worker has ended, the supervisor adds its file
to the sum of those before. So counters never go backwards, and a scrape that any worker answers is exact: it
asks the others to write first.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import msgspec

from penstock.gateway.telemetry.worker_metrics import WorkerMetrics, add
from penstock.gateway.workers.exchange import WorkerName
from penstock.logging_setup import RateLimitedLog
from penstock.metrics.snapshot import Series

_complain = RateLimitedLog(logging.getLogger(__name__))

MAX_ENDED_SERIES = 20_000
"""Series in the sum of the workers that have ended; those for which there is no room are left out."""
_PREFIX = "metrics-"
_SUM = "metrics-ended"


class EndedWorkers(msgspec.Struct, array_like=True):
    """The sum of the workers that have ended. By a worker's number, the last epoch that is in it."""

    covers: dict[int, int]
    counted: list[Series]


_encode = msgspec.msgpack.Encoder().encode
_worker_decoder = msgspec.msgpack.Decoder(WorkerMetrics)
_ended_decoder = msgspec.msgpack.Decoder(EndedWorkers)


class MetricFiles:
    """The files in a run directory. A fault of the disk is logged, and costs what it hides."""

    def __init__(self, run_dir: str) -> None:
        self._directory = Path(run_dir)

    def write(self, worker: WorkerName, metrics: WorkerMetrics) -> None:
        self._replace(f"{_PREFIX}{worker}", _encode(metrics))

    def read_others(self, own: WorkerName) -> list[WorkerMetrics]:
        """Those of the other workers, and the sum of the ended ones as one of them."""
        found: dict[WorkerName, WorkerMetrics] = {}
        with contextlib.suppress(OSError):
            for name in os.listdir(self._directory):
                worker = _worker_of(name)
                if worker is not None and worker != own and (metrics := self._read(worker)) is not None:
                    found[worker] = metrics
        # Read last: what has been added to the sum meanwhile is in it, and counts once.
        ended = self._read_sum()
        alive = [each for name, each in found.items() if ended.covers.get(name.number, -1) < name.epoch]
        return [*alive, WorkerMetrics(ended.counted, [])]

    def add_to_sum(self, worker: WorkerName) -> None:
        """The worker has ended. For the supervisor alone, in the order of the epochs of a number."""
        metrics, ended = self._read(worker), self._read_sum()
        if metrics is not None:
            values = {(each.family, each.labels): each.value for each in ended.counted}
            for each in metrics.counted:
                key = each.family, each.labels
                if key in values:
                    values[key] = add(values[key], each.value)
                elif len(values) < MAX_ENDED_SERIES:
                    values[key] = each.value
            ended.counted = [Series(*key, value) for key, value in values.items()]
        ended.covers[worker.number] = worker.epoch
        self._replace(_SUM, _encode(ended))
        with contextlib.suppress(OSError):
            os.unlink(self._directory / f"{_PREFIX}{worker}")

    def _read(self, worker: WorkerName) -> WorkerMetrics | None:
        try:
            return _worker_decoder.decode((self._directory / f"{_PREFIX}{worker}").read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            _complain("read", "metrics of worker %s are lost: %s", worker, error)
            return None

    def _read_sum(self) -> EndedWorkers:
        try:
            return _ended_decoder.decode((self._directory / _SUM).read_bytes())
        except FileNotFoundError:
            return EndedWorkers({}, [])
        except (OSError, msgspec.MsgspecError) as error:
            _complain("sum", "metrics of ended workers are lost: %s", error)
            return EndedWorkers({}, [])

    def _replace(self, name: str, data: bytes) -> None:
        temporary = self._directory / f"{name}.new"
        try:
            temporary.write_bytes(data)
            temporary.replace(self._directory / name)
        except OSError as error:
            _complain("write", "metrics cannot be shared with the other workers: %s", error)


def _worker_of(name: str) -> WorkerName | None:
    index, _, epoch = name.removeprefix(_PREFIX).partition(".")
    is_worker = name.startswith(_PREFIX) and index.isdecimal() and epoch.isdecimal()
    return WorkerName(int(index), int(epoch)) if is_worker else None
