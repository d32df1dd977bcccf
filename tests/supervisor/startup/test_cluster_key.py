from __future__ import annotations

import stat
from pathlib import Path

import pytest

from penstock.config.errors import ConfigError
from penstock.supervisor.startup.cluster_key import KEY_FILE_PREFIX, read_cluster_key, write_cluster_key
from penstock.wire.curve import ClusterKey


def test_a_key_file_is_read_by_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "fleet.key"
    write_cluster_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    secret = read_cluster_key(str(path))
    assert ClusterKey(secret).secret == secret
    assert path.read_text() == f"{KEY_FILE_PREFIX}{secret}\n"


def test_keys_differ_and_none_is_overwritten(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_cluster_key(tmp_path / name)
    before = (tmp_path / "a").read_text()
    assert before != (tmp_path / "b").read_text()
    with pytest.raises(FileExistsError):
        write_cluster_key(tmp_path / "a")
    assert (tmp_path / "a").read_text() == before


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        (b"", "no key file"),
        (b"-----BEGIN PRIVATE KEY-----", "no key file"),
        (KEY_FILE_PREFIX.encode() + b"x" * 39, "not a secret key"),
        (b"\xff\xfe", "can't decode"),
    ],
)
def test_what_is_no_key_file(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "fleet.key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^--cluster-key-file {path}: .*{reason}"):
        read_cluster_key(str(path))


def test_a_key_that_everybody_can_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "fleet.key"
    write_cluster_key(path)
    read_cluster_key(str(path))
    assert caplog.text == ""
    path.chmod(0o644)
    read_cluster_key(str(path))
    assert "chmod o-r" in caplog.text
