"""``penstock bench adapters`` as a whole."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from penstock.bench import adapter_benchmark
from penstock.bench.errors import BenchError
from penstock.cli.main import main
from penstock.config.bench import BenchAdaptersConfig

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs the torch extra")


@needs_torch
def test_a_run_for_each_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    arguments = ["--ranks", "2", "4", "--adapters", "3", "--rows", "5", "--steps", "4", "--rounds", "2"]
    assert main(["bench", "adapters", *arguments, "--json", str(path)]) == 0
    report = json.loads(path.read_bytes())
    assert [run["rank"] for run in report["runs"]] == [2, 4]
    assert (report["adapters"], report["rows"], report["layers"]) == (3, 5, 14)
    for run in report["runs"]:
        assert run["ratio"] == pytest.approx(run["adapters_ms"] / run["base_ms"])
        assert run["base_ms"] > 0
    assert report["ratio"] == max(run["ratio"] for run in report["runs"])
    out, err = capsys.readouterr()
    assert "3 adapters of 14 layers over 5 rows, cpu, float32" in out
    assert "rank 4: 2 rounds of 4 steps" in err


@needs_torch
def test_streams_that_do_not_fit_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.engine.torch import memory

    monkeypatch.setattr(memory, "CPU_CACHE_BYTES", 1 << 16)
    with pytest.raises(BenchError, match="--rows and --steps need 8832"):
        adapter_benchmark.measure(BenchAdaptersConfig(), print)


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BenchError, match="the torch engine is not installed"):
        adapter_benchmark.measure(BenchAdaptersConfig(), print)
