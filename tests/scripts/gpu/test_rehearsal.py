"""The whole script on a CPU with tiny shapes; these tests need the torch extra."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.gpu.machine import ROOT

pytest.importorskip("torch")
pytest.importorskip("transformers")

STREAMS = ["4 streams, 8 in, 16 out, interval 1", "1 stream, 8 in, 16 out, interval 1"]
SERVED = [*STREAMS, "4 streams, 8 in, 16 out, interval 10"]
SEEDS = ["8 streams, 12 in, 50 out, interval 1", "8 streams, 12 in, 50 out, interval 10"]
DECODES = ["4 streams, context 32", "1 stream, context 32", "1 stream, context 128"]
MINUTES = 20
"""No stage of the rehearsal needs its share of them."""


def rehearse(folder: Path, stages: str) -> dict[str, Any]:
    """The report of a run in which nothing failed."""
    command = [sys.executable, "-m", "scripts.gpu.run", "--device=cpu", "--tiny", f"--minutes={MINUTES}"]
    ended = subprocess.run(
        [*command, f"--out={folder}", f"--stages={stages}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=MINUTES * 60,
    )
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    assert ended.returncode == 0, ended.stdout[-5000:]
    assert all(stage["status"] == "done" for stage in report["stages"])
    assert all(stage["measurements"] for stage in report["stages"])
    assert "error" not in (folder / "report.md").read_text()
    return report


def table(report: dict[str, Any], title: str, shape: str = "") -> dict[str, dict[str, Any]]:
    """Values by name; of a shape, without it in front."""
    told = [each for stage in report["stages"] for each in stage["measurements"] if each["table"] == title]
    before = f"{shape}: " if shape else ""
    return {
        each["name"].removeprefix(before): each["values"] for each in told if each["name"].startswith(before)
    }


def check_steps(report: dict[str, Any], shape: str) -> None:
    steps = table(report, "c. steps", shape)
    assert list(steps) == DECODES
    for values in steps.values():
        assert values["step ms"] > 0
        assert values["device busy ms"] > 0
        assert values["device idle %"] == pytest.approx(
            100 * (1 - values["device busy ms"] / values["step ms"])
        )
        phases = [
            values[f"{name} ms"]
            for name in ("schedule", "sampling data", "inputs", "forward", "sample", "read", "settle")
        ]
        assert all(ms > 0 for ms in phases)
        assert values["host CPU ms"] > 0
    assert len(table(report, "c. kernels", shape)) == 6 * len(DECODES)
    assert table(report, "c. prefill", shape)["100 tokens, 1 prompt"]["tokens/s"] > 0
    turns = table(report, "c. CUDA graphs", shape)["1 stream, context 32"]
    assert turns["ratio"] == pytest.approx(turns["without ms"] / turns["with graphs ms"])


def check_roofline(report: dict[str, Any], shape: str) -> None:
    decodes = table(report, "d. decode", shape)
    assert list(decodes) == DECODES
    for values in decodes.values():
        assert values["achieved %"] == pytest.approx(100 * values["floor ms"] / values["step ms"])
    assert table(report, "d. prefill", shape)["100 tokens, 1 prompt"]["achieved %"] > 0


def check_serving(report: dict[str, Any], title: str, shape: str, names: list[str]) -> None:
    loads = table(report, title, shape)
    assert list(loads) == names
    for values in loads.values():
        assert values["failed"] == 0
        assert values["tokens/s"] > 0
        assert values["steps/s"] > 0
        assert 0 < values["TTFT p50 ms"] <= values["TTFT p99 ms"]
        assert values["API server µs/token"] > 0
        assert values["engine CPU µs/token"] > 0
    start = table(report, "starts", shape)[title[3:]]
    assert start["seconds"] > 0
    assert int(start["KV cache tokens"].replace(",", "")) > 0


def test_steps_and_roofline(tmp_path: Path) -> None:
    report = rehearse(tmp_path, "steps: opt,roofline")
    check_steps(report, "opt-125m")
    check_roofline(report, "opt-125m")


@pytest.mark.slow
def test_every_stage(tmp_path: Path) -> None:
    report = rehearse(tmp_path, "a,b,c,d,e,f")
    assert [stage["stage"] for stage in report["stages"]] == list("abccccdeef")
    for title in ("a. tests of the torch engine", "b. equality with transformers"):
        counts = table(report, title)
        assert sum(values["passed"] for values in counts.values()) > 0
        assert not any(values["failed"] for values in counts.values())
    for shape in ("opt-125m", "llama-8b"):
        check_serving(report, "c. serve", shape, SERVED)
        check_steps(report, shape)
        check_roofline(report, shape)
        served = table(report, "d. serving beside the engine alone", shape)
        assert set(served) <= set(STREAMS)
        assert all(values["engine alone"] in DECODES for values in served.values())
        beside = table(report, "e. transformers", shape)
        assert list(beside) == STREAMS
        assert all(values["Penstock to transformers"] > 0 for values in beside.values())
    check_serving(report, "f. seeds", "opt-125m", SEEDS)
    assert list(table(report, "d. machine")) == ["copy", "read", "bfloat16 matrix product"]
    assert {"GPU", "machine", "Python", "packages", "Penstock"} <= report["facts"].keys()
    assert (tmp_path / "report.md").read_text().count("### ") >= 13
