from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config.secret_files import warn_if_open_to_others


@pytest.mark.parametrize(
    ("mode", "warnings"),
    [
        (0o600, []),
        (0o640, []),
        (0o644, ["read by"]),
        (0o602, ["replaced by"]),
        (0o666, ["read by", "replaced"]),
    ],
)
def test_a_file_that_others_can_read_or_write_is_warned_about(
    mode: int, warnings: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "key"
    path.touch()
    path.chmod(mode)
    warn_if_open_to_others("--ssl-keyfile", str(path))
    assert len(caplog.messages) == len(warnings)
    for message, expected in zip(caplog.messages, warnings, strict=True):
        assert message.startswith(f"--ssl-keyfile {path} can be {expected}")


def test_a_file_that_is_not_there_is_reported_where_it_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_open_to_others("--ssl-keyfile", str(tmp_path / "key"))
    assert caplog.messages == []
