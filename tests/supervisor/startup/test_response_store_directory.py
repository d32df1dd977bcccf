"""Where stored responses are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig
from penstock.supervisor.startup.response_store_directory import response_store_directory


def test_a_directory_that_cannot_be_made_names_its_option(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    config = ServeConfig(model="m", response_store_dir=str(file / "responses"))
    with pytest.raises(ConfigError) as caught, response_store_directory(config, str(tmp_path)):
        pass
    assert str(caught.value).startswith(f"--response-store-dir {file / 'responses'}: ")


def test_a_directory_that_an_option_names_is_made(tmp_path: Path) -> None:
    named = tmp_path / "responses"
    config = ServeConfig(model="m", response_store_dir=str(named))
    with response_store_directory(config, str(tmp_path)) as directory:
        assert (directory, named.is_dir()) == (str(named), True)
    assert named.is_dir()
