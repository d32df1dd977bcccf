"""No disk space, inodes or descriptors: one clear line and an exit code, or fewer connections at a time."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.exit_codes import EXIT_FAILED, StartupError
from penstock.supervisor.startup import run_directory
from penstock.supervisor.startup.run_directory import RunDirectory
from tests.integration.server import SYNTHETIC
from tests.supervisor.harness import PATIENCE_S


def full(*_: object, **__: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["tempfile.mkdtemp", "os.open", "os.pwrite", "os.scandir"])
@pytest.mark.parametrize("given", [True, False])
def test_a_run_directory_on_a_full_disk_is_one_clear_error(
    call: str, given: bool, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given and call == "tempfile.mkdtemp":
        pytest.skip("a given directory is not temporary")
    monkeypatch.setattr("tempfile.tempdir", str(short_dir))
    path = str(short_dir / "run") if given else None
    module, _, name = call.partition(".")
    with monkeypatch.context() as patched:
        patched.setattr(getattr(run_directory, module), name, full)
        with pytest.raises(StartupError, match="run directory .*No space left on device"):
            RunDirectory(path).__enter__()
    if call == "os.pwrite":  # without the others nothing can be removed, either
        assert [each for each in short_dir.iterdir() if each.name != "run"] == []
    with RunDirectory(path):
        pass


@pytest.fixture
def tiny_disk(short_dir: Path) -> Iterator[Path]:
    """A file system with room for a directory and a file or two, where this user may mount one."""
    path = short_dir / "disk"
    path.mkdir()
    options = ["-t", "tmpfs", "-o", "size=16k,nr_inodes=4"]
    try:
        made = subprocess.run(["mount", *options, "tmpfs", str(path)], capture_output=True)
    except OSError:
        pytest.skip("there is no mount")
    if made.returncode != 0:
        pytest.skip("this user may not mount")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.parametrize("files", [3, 1])
def test_a_full_disk_at_start(tiny_disk: Path, files: int) -> None:
    """The run directory itself cannot be made, or the sockets of the processes cannot."""
    for number in range(files):
        (tiny_disk / f"{number}").touch()
    ended = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "serve", "--port", "0", *SYNTHETIC],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "PENSTOCK_RUN_DIR": str(tiny_disk / "run"),
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode in (EXIT_FAILED, 2), ended.stderr
    assert "No space left on device" in ended.stderr
    assert "Traceback" not in ended.stderr
