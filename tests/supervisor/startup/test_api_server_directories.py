"""The directory of weights that trainers broadcast."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig
from penstock.supervisor.startup.api_server_directories import weights_directory


def test_each_server_has_one_of_its_own_which_it_removes(tmp_path: Path) -> None:
    parent = tmp_path / ("long" * 30)
    parent.mkdir()
    config = ServeConfig(model="m", weights_dir=str(parent))
    with weights_directory(config) as one, weights_directory(config) as other:
        assert {Path(one).parent, Path(other).parent} == {parent}
        assert one != other
        (Path(one) / "w.safetensors").write_bytes(b"x")
    assert list(parent.iterdir()) == []


def test_a_directory_that_is_none_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(ConfigError, match=r"--weights-dir .*missing: is no directory"):
        weights_directory(ServeConfig(model="m", weights_dir=str(missing))).__enter__()
