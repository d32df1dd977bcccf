"""``penstock bench start`` as a whole."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from penstock.cli.main import main


def test_one_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    assert main(["bench", "start", "--rounds", "1", "--json", str(path)]) == 0
    report = json.loads(path.read_bytes())
    assert (report["api_servers"], report["engines"], report["rounds"]) == (1, 1, 1)
    [cost] = report["starts"].values()
    assert 0 < cost["ready_cpu_s"] <= cost["total_cpu_s"]
    if sys.platform == "linux":
        assert 0 < cost["api_server_bytes"] < cost["memory_bytes"]
    assert "CPU until ready" in capsys.readouterr().out
