"""``penstock bench engine`` as a whole, and what it must find."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.bench import engine_benchmark
from penstock.bench.errors import BenchError
from penstock.bench.noop_engine import NoOpEngine
from penstock.cli.main import main
from penstock.config.bench import BenchEngineConfig
from penstock.engine.base import StepRows
from tests.engine.support import submit


def run(*arguments: str, path: Path) -> dict[str, Any]:
    """Runs the command and returns what it wrote to ``--json``."""
    assert main(["bench", "engine", *arguments, "--json", str(path)]) == 0
    report: dict[str, Any] = json.loads(path.read_bytes())
    return report


def test_a_thousand_steps_of_1024_rows_leave_nothing_to_collect(tmp_path: Path) -> None:
    assert gc.isenabled()
    report = run("--rows", "1024", "--steps", "1000", path=tmp_path / "report.json")
    (only,) = report["runs"]
    assert (only["rows"], only["steps"], only["gc_threshold"]) == (1024, 1000, list(gc.get_threshold()))
    assert only["tracked_objects"] < 100
    assert report["tracked_objects_per_step"] == only["tracked_objects"] / 1000
    assert report["collections"] == 0
    assert report["host_ms_per_step"] > 0


def test_objects_that_stay_and_collections_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[list[int]] = []
    step = NoOpEngine.step

    def leaky(self: NoOpEngine) -> StepRows:
        kept.extend([] for _ in range(10))
        return step(self)

    monkeypatch.setattr(NoOpEngine, "step", leaky)
    (found,) = engine_benchmark.measure(BenchEngineConfig(rows=[4], steps=200), print).runs
    assert 1990 <= found.tracked_objects < 2100  # a few others may go meanwhile
    assert found.collections >= 1


def test_a_run_for_each_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--rows", "8", "3", "--sequence-length", "1", "100", "--steps", "7"]
    report = run(*arguments, path=tmp_path / "report.json")
    pairs = [(run["rows"], run["sequence_length"]) for run in report["runs"]]
    assert pairs == [(8, 1), (8, 100), (3, 1), (3, 100)]
    assert report["host_ms_per_step"] == report["runs"][0]["host_ms_per_step"]
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1 + len(pairs) + 2
    assert "8 rows at sequence length 100" in err


@pytest.mark.parametrize(
    "options", [{}, {"stream_interval": 10}, {"api_server_count": 2}, {"accept": 2}], ids=str
)
def test_logprobs_leave_nothing_to_collect(options: dict[str, Any]) -> None:
    """The reader ends with an error at a token without logprobs."""
    config = BenchEngineConfig(rows=[64], steps=500, sequence_length=[4], logprobs=0, **options)
    (found,) = engine_benchmark.measure(config, print).runs
    assert found.tracked_objects < 50
    assert found.collections == 0


def test_rows_of_an_interval_take_turns() -> None:
    engine = NoOpEngine(24, 200, 24 * 4)
    for stream in range(24):
        engine.submit(0, submit(stream, 100, prompt=[stream, 5, 5, 5], interval=8))
    assert [len(engine.step().stream) for _ in engine.take_turns(8)] == [24, *[3] * 8]
    rows = [engine.step() for _ in range(16)]
    assert [len(each.stream) for each in rows] == [3] * 16
    assert all(each.count is not None and set(each.count.tolist()) == {8} for each in rows)


def test_a_comparison_by_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--rows", "4", "--steps", "40", "--rounds", "3", "--compare-with=--logprobs=2"]
    report = run(*arguments, path=tmp_path / "report.json")
    assert (len(report["first"]), len(report["second"]), report["changes"]) == (3, 3, "--logprobs=2")
    assert 0 < report["least"] <= report["ratio"] <= report["most"]
    out, err = capsys.readouterr()
    assert "4 rows; second: the same with --logprobs=2" in out
    assert "round 3 of 3" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rows", "4", "8", "--compare-with=--logprobs=0"],
        ["--compare-with=--rounds=3"],
        ["--rows", "2", "--api-server-count", "3"],
        ["--logprobs", "1025"],
    ],
    ids=str,
)
def test_options_that_contradict(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", *arguments]) == 2
    assert "penstock: error: --" in capsys.readouterr().err


def test_a_reader_that_ends_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_benchmark, "TOKEN", -1)  # which no request may hold: the reader gives up
    with pytest.raises(BenchError, match="the reader ended with exit code 1"):
        engine_benchmark.measure(BenchEngineConfig(rows=[2], steps=5), print)


def test_more_than_can_be_held_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "--rows", "1", "65536", "--sequence-length", "8192"]) == 2
    assert "536,870,912 tokens of prompts, at most 268,435,456" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--rows", "--steps", "--sequence-length"])
def test_nothing_to_measure_is_an_error(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", option, "0"]) == 2
    assert option in capsys.readouterr().err
