from __future__ import annotations

import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest

from penstock.config.errors import ConfigError
from penstock.exit_codes import StartupError
from penstock.supervisor.startup.run_directory import MAX_PATH_BYTES, PID_FILE, RunDirectory
from penstock.wire.sockets import process_group_spec


def _leave_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


def test_a_temporary_one_is_private_short_and_removed() -> None:
    with RunDirectory(None) as run:
        path = Path(run.path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert len(os.fsencode(run.path)) <= MAX_PATH_BYTES
        assert (path / PID_FILE).read_text() == f"{os.getpid()}\n"
        _leave_socket(path / "engine-0")
    assert not path.exists()


def test_a_long_tmpdir_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * MAX_PATH_BYTES)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with RunDirectory(None) as run:
        assert run.path.startswith("/tmp/penstock-")


def test_temporary_ones_of_killed_instances_are_removed(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_dir))
    abandoned, new, foreign = (
        short_dir / f"penstock-{name}" for name in ("killed00", "begins00", "a-file00")
    )
    for path in (abandoned, new, foreign):
        path.mkdir()
    (abandoned / PID_FILE).write_text("4000000\n")
    _leave_socket(abandoned / "engine-0")
    (new / PID_FILE).touch()
    (foreign / "notes").touch()
    with RunDirectory(None) as other, RunDirectory(None) as run:
        assert not abandoned.exists()
        assert all(path.exists() for path in (new, foreign, Path(other.path), Path(run.path)))


def test_a_temporary_one_is_removed_after_an_error() -> None:
    with pytest.raises(KeyError), RunDirectory(None) as run:
        raise KeyError
    assert not Path(run.path).exists()


def test_a_given_one_is_made_private_and_stays_without_sockets(short_dir: Path) -> None:
    path = short_dir / "a" / "b"
    with RunDirectory(str(path)) as run:
        assert run.path == str(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        _leave_socket(path / "engine-0")
        Path(process_group_spec(run.path, rank=0, size=2, epoch=0, incarnation=1).rendezvous).touch()
    assert [entry.name for entry in path.iterdir()] == [PID_FILE]
    with RunDirectory(str(path)):
        pass


def test_an_existing_empty_one_is_made_private(short_dir: Path) -> None:
    short_dir.chmod(0o755)
    with RunDirectory(str(short_dir)):
        assert stat.S_IMODE(short_dir.stat().st_mode) == 0o700


def test_what_a_killed_instance_left_is_cleaned(short_dir: Path) -> None:
    (short_dir / PID_FILE).write_text("12345\n")
    _leave_socket(short_dir / "engine-0")
    with RunDirectory(str(short_dir)):
        assert not (short_dir / "engine-0").exists()
        assert (short_dir / PID_FILE).read_text() == f"{os.getpid()}\n"


def test_one_of_a_living_instance_is_refused_and_left_alone(short_dir: Path) -> None:
    with RunDirectory(str(short_dir)):
        _leave_socket(short_dir / "engine-0")
        with (
            pytest.raises(StartupError, match=rf"in use by another penstock \(process {os.getpid()}\)"),
            RunDirectory(str(short_dir)),
        ):
            pass
        assert (short_dir / "engine-0").exists()
        assert (short_dir / PID_FILE).read_text() == f"{os.getpid()}\n"


def test_a_directory_with_other_files_is_refused_and_left_alone(short_dir: Path) -> None:
    short_dir.chmod(0o755)
    (short_dir / "thesis.txt").write_text("")
    with pytest.raises(ConfigError, match=r"--run-dir .*: holds other files"), RunDirectory(str(short_dir)):
        pass
    assert stat.S_IMODE(short_dir.stat().st_mode) == 0o755


def test_a_file_is_refused(short_dir: Path) -> None:
    path = short_dir / "file"
    path.write_text("")
    with pytest.raises(ConfigError, match="is no directory"), RunDirectory(str(path)):
        pass
    with pytest.raises(ConfigError, match="Not a directory"), RunDirectory(str(path / "below")):
        pass


def test_a_path_that_is_too_long_for_sockets_is_refused() -> None:
    path = "/tmp/" + "x" * MAX_PATH_BYTES
    message = rf"has {len(path)} bytes, at most {MAX_PATH_BYTES}"
    with pytest.raises(ConfigError, match=message), RunDirectory(path):
        pass
    assert not Path(path).exists()


def test_one_of_another_user_is_refused(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000_000)
    with pytest.raises(ConfigError, match="belongs to another user"), RunDirectory(str(short_dir)):
        pass
