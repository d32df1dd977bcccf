"""The sum of ended workers, and what a reader sees of it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from penstock.gateway.telemetry.worker_metrics import WorkerMetrics, summed
from penstock.gateway.workers import metric_files
from penstock.gateway.workers.exchange import WorkerName
from penstock.gateway.workers.metric_files import MetricFiles
from penstock.metrics.snapshot import Distribution, Labels, Series, Value

OWN, SIBLING = WorkerName(0, 0), WorkerName(1, 0)


def metrics(count: float, model: str = "m") -> WorkerMetrics:
    counted = [Series("c", (model,), count), Series("h", (), Distribution((1, int(count)), count))]
    return WorkerMetrics(counted, [Series("g", (), count)])


def totals(files: MetricFiles) -> dict[tuple[str, Labels], Value]:
    found: dict[tuple[str, Labels], Value] = {}
    for worker in files.read_others(OWN):
        for each in (*worker.counted, *worker.gauges):
            found[each.family, each.labels] = summed(
                {each.labels: found.get((each.family, each.labels), 0.0)}
                if (each.family, each.labels) in found
                else {},
                [each],
            )[each.labels]
    return found


def test_what_ended_workers_counted_stays_and_their_gauges_go(tmp_path: Path) -> None:
    files = MetricFiles(str(tmp_path))
    assert totals(files) == {}
    files.write(OWN, metrics(100.0))  # its reader knows it better
    files.write(SIBLING, metrics(5.0))
    assert totals(files) == {("c", ("m",)): 5.0, ("h", ()): Distribution((1, 5), 5.0), ("g", ()): 5.0}
    files.add_to_sum(SIBLING)
    assert totals(files) == {("c", ("m",)): 5.0, ("h", ()): Distribution((1, 5), 5.0)}
    second = WorkerName(1, 1)
    files.write(second, metrics(2.0))
    assert totals(files)["c", ("m",)] == 7.0
    files.add_to_sum(second)
    files.add_to_sum(WorkerName(1, 2))  # it never wrote anything
    assert totals(files) == {("c", ("m",)): 7.0, ("h", ()): Distribution((2, 7), 7.0)}
    assert [path.name for path in tmp_path.glob("metrics-1*")] == []


def test_a_worker_whose_file_is_still_there_counts_once(tmp_path: Path) -> None:
    files = MetricFiles(str(tmp_path))
    files.write(SIBLING, metrics(5.0))
    kept = (tmp_path / "metrics-1.0").read_bytes()
    files.add_to_sum(SIBLING)
    (tmp_path / "metrics-1.0").write_bytes(kept)  # as between the two steps of the supervisor
    assert totals(files) == {("c", ("m",)): 5.0, ("h", ()): Distribution((1, 5), 5.0)}


def test_the_sum_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_files, "MAX_ENDED_SERIES", 3)
    files = MetricFiles(str(tmp_path))
    for number in range(5):
        files.write(WorkerName(1, number), metrics(1.0, f"m{number}"))
        files.add_to_sum(WorkerName(1, number))
    assert totals(files) == {
        ("c", ("m0",)): 1.0,
        ("c", ("m1",)): 1.0,
        ("h", ()): Distribution((5, 5), 5.0),
    }


def test_files_that_cannot_be_read_cost_themselves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = MetricFiles(str(tmp_path))
    files.write(SIBLING, metrics(5.0))
    (tmp_path / "metrics-2.0").write_bytes(b"nonsense")
    (tmp_path / "metrics-x").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert totals(files)["c", ("m",)] == 5.0
    assert "metrics of worker 2.0 are lost" in caplog.text
