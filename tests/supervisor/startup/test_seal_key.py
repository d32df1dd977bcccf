"""The secret that seals summaries."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig
from penstock.supervisor.startup.seal_key import FILE, seal_key

PLAIN = ServeConfig(model="m")


def test_it_stays_beside_the_stored_responses(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        keys = set(threads.map(lambda _: seal_key(PLAIN, str(tmp_path)), range(32)))
    assert keys == {seal_key(PLAIN, str(tmp_path))}
    assert [each.name for each in tmp_path.iterdir()] == [FILE]
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


def test_without_a_directory_it_lasts_as_long_as_the_server() -> None:
    assert seal_key(PLAIN, None) != seal_key(PLAIN, None)


def test_a_file_that_hosts_share_takes_precedence(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("k" * 40 + "\n")
    config = ServeConfig(model="m", seal_key_file=str(file))
    assert seal_key(config, str(tmp_path)) == b"k" * 40 == seal_key(config, None)


@pytest.mark.parametrize("text", ["", "short", "x" * 5000, None])
def test_a_file_without_a_secret_is_an_error(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "key"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match="--seal-key-file") as raised:
        seal_key(ServeConfig(model="m", seal_key_file=str(file)), None)
    assert "xxx" not in str(raised.value)
