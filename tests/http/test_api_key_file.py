from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from penstock.config.errors import ConfigError
from penstock.config.gateway import GatewayConfig
from penstock.config.origins import Origin
from penstock.config.serve import ServeConfig
from penstock.http.api_key_file import load_api_keys, reload_api_keys


def write(directory: Path, text: str, mode: int = 0o600) -> str:
    path = directory / "keys"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_without_keys_nothing_changes() -> None:
    assert load_api_keys(ServeConfig(), {}) == ServeConfig()


def test_keys_of_the_file_follow_the_others_each_once(tmp_path: Path) -> None:
    path = write(tmp_path, "\n# of the batch jobs\n two \none\n\nthree")
    config = load_api_keys(ServeConfig(api_key=["one"], api_key_file=path), {})
    assert config.api_key == ["one", "two", "three"]


def test_keys_of_administrators(tmp_path: Path) -> None:
    path = write(tmp_path, "two\none\n")
    config = load_api_keys(ServeConfig(admin_api_key=["one"], admin_api_key_file=path, api_key=["k"]), {})
    assert (config.admin_api_key, config.api_key) == (["one", "two"], ["k"])
    with pytest.raises(ConfigError, match=r"--admin-api-key-file .*: line 1 is a key of clients as well"):
        load_api_keys(ServeConfig(admin_api_key_file=path, api_key=["two"]), {})
    with pytest.raises(ConfigError, match="--admin-api-key: key 1 has characters"):
        load_api_keys(GatewayConfig(admin_api_key=["a b"]), {})


@pytest.mark.parametrize("text", ["", "\n\n", "# a comment\n"])
def test_a_file_without_keys_does_not_open_the_server(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=rf"--api-key-file {re.escape(path)}: there is no key"):
        load_api_keys(ServeConfig(api_key_file=path), {})


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--api-key-file .*absent"):
        load_api_keys(ServeConfig(api_key_file=str(tmp_path / "absent")), {})
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"--api-key-file .*bytes"):
        load_api_keys(ServeConfig(api_key_file=str(tmp_path / "bytes")), {})


@pytest.mark.parametrize("key", ["two words", "schlüssel", "a\x7f"])
def test_a_key_no_client_could_send_is_named_by_its_place_alone(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match="--api-key: key 2 has") as caught:
        load_api_keys(ServeConfig(api_key=["fine", key]), {})
    assert key not in str(caught.value)
    with pytest.raises(ConfigError, match="line 2 has") as caught:
        load_api_keys(ServeConfig(api_key_file=write(tmp_path, f"\n{key}\n")), {})
    assert key not in str(caught.value)


def test_places_that_others_can_read_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = ServeConfig(api_key=["topsecret"])
    with caplog.at_level(logging.WARNING):
        load_api_keys(config, {"api_key": Origin("environment", "PENSTOCK_API_KEY")})
        load_api_keys(ServeConfig(api_key_file=write(tmp_path, "topsecret")), {})
        assert not caplog.records
        load_api_keys(config, {"api_key": Origin("command line", "--api-key")})
        load_api_keys(ServeConfig(api_key_file=write(tmp_path, "topsecret", 0o644)), {})
    assert len(caplog.records) == 2
    assert "topsecret" not in caplog.text
    assert "every user of this machine" in caplog.text
    assert "chmod o-r" in caplog.text


def test_files_are_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log has numbers, and no key."""
    path = write(tmp_path, "leaked\nkept\n")
    given = ServeConfig(api_key=["own"], api_key_file=path, admin_api_key=["admin"])
    before = load_api_keys(given, {})
    write(tmp_path, "kept\nsecond\nthird\n")
    with caplog.at_level(logging.INFO):
        after = reload_api_keys(given, before)
    assert after is not None
    assert (after.api_key, after.admin_api_key) == (["own", "kept", "second", "third"], ["admin"])
    assert caplog.messages == [
        "SIGHUP: --api-key-file: 4 keys are in effect, 2 added, 1 removed",
    ]
    caplog.clear()
    write(tmp_path, "# none\n")
    assert reload_api_keys(given, after) is None
    assert "there is no key in it" in caplog.text
    assert "the keys stay as they are" in caplog.text
    assert reload_api_keys(ServeConfig(), ServeConfig()) == ServeConfig()
