"""``penstock keys cluster``."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.supervisor.startup.cluster_key import read_cluster_key


def test_a_key_is_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "fleet.key")
    assert main(["keys", "cluster", path]) == 0
    said = capsys.readouterr().out
    secret = read_cluster_key(path)
    assert path in said
    assert secret not in said
    assert main(["keys", "cluster", path]) == 2
    assert f"{path}: exists" in capsys.readouterr().err
    assert read_cluster_key(path) == secret


def test_a_place_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "cluster", str(tmp_path / "absent" / "fleet.key")]) == 2
    assert "No such file" in capsys.readouterr().err
