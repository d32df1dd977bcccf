"""No disk space, inodes or descriptors: one clear line and an exit code, or fewer connections at a time."""

from __future__ import annotations

import errno
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.exit_codes import EXIT_FAILED, StartupError
from penstock.supervisor.startup import run_directory
from penstock.supervisor.startup.run_directory import RunDirectory
from tests.integration.server import SYNTHETIC, Server
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
        with pytest.raises(StartupError, match=r"run directory .*No space left on device"):
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


@pytest.mark.slow
@pytest.mark.parametrize(("api_servers", "limit"), [(1, 40), (2, 48)])
def test_more_clients_than_descriptors_wait_and_running_streams_go_on(
    api_servers: int, limit: int, tmp_path: Path
) -> None:
    """Every client is served in the end: none is reset, and the log tells once that others wait."""
    arguments = ("--synthetic-step-ms", "5", "--api-server-count", str(api_servers))
    within = ("prlimit", f"--nofile={limit}:{limit}")
    with Server(*SYNTHETIC, *arguments, directory=tmp_path, within=within) as server:
        host, port = server.url.removeprefix("http://").split(":")

        def read_stream(tokens: int) -> str:
            body = f'{{"prompt": "x", "max_tokens": {tokens}, "stream": true, "ignore_eos": true}}'.encode()
            with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as client:
                client.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                    b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
                )
                return client.makefile().read()

        with ThreadPoolExecutor(204) as clients:
            running = [clients.submit(read_stream, 400) for _ in range(4)]
            others = [clients.submit(read_stream, 2) for _ in range(200)]
            replies = [each.result(timeout=PATIENCE_S) for each in (*running, *others)]
        assert all("[DONE]" in reply for reply in replies)
        assert server.metric("penstock:accept_pauses_total") > 0
        for index in range(api_servers):
            line = rf"api-server {index} +\d+ connections are open, as many as the limit of open files"
            assert len(re.findall(line, server.log)) <= 1
        assert "as many as the limit of open files allows (ulimit -n); others wait" in server.log
