"""``penstock bench columns`` as a whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli.main import main


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    load = ["--choices", "3", "--tokens", "300", "--logprobs", "2", "--rounds", "1"]
    assert main(["bench", "columns", *load, "--json", str(path)]) == 0
    report = json.loads(path.read_bytes())
    assert (report["tokens"], report["logprobs"]) == (900, 2)
    columns, whole = report["replies"]
    assert (columns["kind"], whole["kind"]) == ("application/vnd.safetensors", "application/json")
    assert 900 * 24 < columns["body_bytes"] < whole["body_bytes"]
    assert min(columns["client_ms"], whole["client_ms"]) > 0
    assert "CPU time of a reply of 900 tokens" in capsys.readouterr().out
