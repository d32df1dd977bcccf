"""``penstock bench images`` as a whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli.main import main


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    small = ["--megapixels", "0.01", "--requests", "20", "--api-server-count", "1", "--engines", "2"]
    assert main(["bench", "images", "--measure", "repeated", *small, "--json", str(path)]) == 0
    report = json.loads(path.read_bytes())
    found = report["repeated"]
    assert (found["sent"], found["decoded"]) == (21, 1)
    assert found["encoded"] in (1, 2), "by each engine that had it, once"
    assert found["prompt_tokens"] > 20
    assert min(found["picture_us"], found["text_us"], found["long_text_us"]) > 0
    assert report["beside"] is None
    assert "decoded 1, encoded" in capsys.readouterr().out
