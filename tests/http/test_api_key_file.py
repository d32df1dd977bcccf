from __future__ import annotations

import logging
import os
import re
import threading
from pathlib import Path

import pytest

from penstock.config.errors import ConfigError
from penstock.config.gateway import GatewayConfig
from penstock.config.origins import Origin, Origins
from penstock.config.serve import ServeConfig
from penstock.config.watched_file import TextFiles
from penstock.http.api_key_file import Config, load_api_keys, reload_api_keys


def write(directory: Path, text: str, mode: int = 0o600) -> str:
    path = directory / "keys"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def load(config: Config, origins: Origins) -> Config:
    """As a server that starts."""
    return load_api_keys(config, origins, TextFiles())


def test_without_keys_nothing_changes() -> None:
    assert load(ServeConfig(), {}) == ServeConfig()


def test_keys_of_the_file_follow_the_others_each_once(tmp_path: Path) -> None:
    path = write(tmp_path, "\n# of the batch jobs\n two \none\n\nthree")
    config = load(ServeConfig(api_key=["one"], api_key_file=path), {})
    assert config.api_key == ["one", "two", "three"]


def test_keys_of_administrators(tmp_path: Path) -> None:
    path = write(tmp_path, "two\none\n")
    config = load(ServeConfig(admin_api_key=["one"], admin_api_key_file=path, api_key=["k"]), {})
    assert (config.admin_api_key, config.api_key) == (["one", "two"], ["k"])
    with pytest.raises(ConfigError, match=r"--admin-api-key-file .*: line 1 is a key of clients as well"):
        load(ServeConfig(admin_api_key_file=path, api_key=["two"]), {})
    with pytest.raises(ConfigError, match="--admin-api-key: key 1 has characters"):
        load(GatewayConfig(admin_api_key=["a b"]), {})


@pytest.mark.parametrize("text", ["", "\n\n", "# a comment\n"])
def test_a_file_without_keys_does_not_open_the_server(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=rf"--api-key-file {re.escape(path)}: there is no key"):
        load(ServeConfig(api_key_file=path), {})


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--api-key-file .*absent"):
        load(ServeConfig(api_key_file=str(tmp_path / "absent")), {})
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"--api-key-file .*bytes"):
        load(ServeConfig(api_key_file=str(tmp_path / "bytes")), {})


@pytest.mark.parametrize("key", ["two words", "schlüssel", "a\x7f"])
def test_a_key_no_client_could_send_is_named_by_its_place_alone(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match="--api-key: key 2 has") as caught:
        load(ServeConfig(api_key=["fine", key]), {})
    assert key not in str(caught.value)
    with pytest.raises(ConfigError, match="line 2 has") as caught:
        load(ServeConfig(api_key_file=write(tmp_path, f"\n{key}\n")), {})
    assert key not in str(caught.value)


def test_places_that_others_can_read_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = ServeConfig(api_key=["topsecret"])
    with caplog.at_level(logging.WARNING):
        load(config, {"api_key": Origin("environment", "PENSTOCK_API_KEY")})
        load(ServeConfig(api_key_file=write(tmp_path, "topsecret")), {})
        assert not caplog.records
        load(config, {"api_key": Origin("command line", "--api-key")})
        load(ServeConfig(api_key_file=write(tmp_path, "topsecret", 0o644)), {})
    assert len(caplog.records) == 2
    assert "topsecret" not in caplog.text
    assert "every user of this machine" in caplog.text
    assert "chmod o-r" in caplog.text


def test_files_are_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log has numbers, and no key."""
    path = write(tmp_path, "leaked\nkept\n")
    given = ServeConfig(api_key=["own"], api_key_file=path, admin_api_key=["admin"])
    files = TextFiles()
    before = load_api_keys(given, {}, files)
    write(tmp_path, "kept\nsecond\nthird\n")
    with caplog.at_level(logging.INFO):
        after = reload_api_keys(given, before, files)
    assert after is not None
    assert (after.api_key, after.admin_api_key) == (["own", "kept", "second", "third"], ["admin"])
    assert caplog.messages == [
        "SIGHUP: --api-key-file: 4 keys are in effect, 2 added, 1 removed",
    ]
    caplog.clear()
    write(tmp_path, "# none\n")
    assert reload_api_keys(given, after, files) is None
    assert f"--api-key-file {path}: it is empty" in caplog.text
    assert "the keys stay as they are" in caplog.text
    assert reload_api_keys(ServeConfig(), ServeConfig(), TextFiles()) == ServeConfig()


@pytest.mark.parametrize(
    ("before", "after", "keys"),
    [
        ("k1\nk3\n", "k1\nk", None),
        ("k1\nk3\n", "k1\nk4", None),
        ("k1\nk3\n", 'k1\n"', None),
        ("k1\nk3", "k1\nk", None),
        ("k1\nk3\n", "k1\n", ["k1"]),
        ("k1", "k2", ["k2"]),
        ("k1\n", "k1\nk2\n", ["k1", "k2"]),
        ("k1", "k1\n", ["k1"]),
    ],
)
def test_a_file_that_is_cut_within_a_line_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: str, after: str, keys: list[str] | None
) -> None:
    """One without a line end, such as a secret of Kubernetes, may be replaced by another one."""
    path, files = write(tmp_path, before), TextFiles()
    given = ServeConfig(api_key_file=path)
    loaded = load_api_keys(given, {}, files)
    write(tmp_path, after)
    again = reload_api_keys(given, loaded, files)
    assert (again and again.api_key) == keys
    assert (f"{path}: its last line has no end, as if it were cut there" in caplog.text) is (keys is None)


def test_a_pipe_is_read_at_the_start_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody may ever write into it again."""
    path, files = tmp_path / "keys", TextFiles()
    os.mkfifo(path, 0o600)
    given = ServeConfig(api_key_file=str(path))
    writer = threading.Thread(target=path.write_text, args=("key\n",))
    writer.start()
    loaded = load_api_keys(given, {}, files)
    writer.join()
    assert loaded.api_key == ["key"]
    assert reload_api_keys(given, loaded, files) is None
    assert f"--api-key-file {path}: it is a pipe, not a file; the keys stay" in caplog.text
