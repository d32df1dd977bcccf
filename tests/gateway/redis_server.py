"""A real Redis server, where there is one."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.gateway.processes import eventually


@contextmanager
def redis_server(directory: Path) -> Iterator[str]:
    """Its URL, on a unix socket in ``directory``. Skips the test without the server or its client."""
    pytest.importorskip("redis")
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("there is no redis-server")
    path = directory / "s"
    process = subprocess.Popen(
        [program, "--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no"],
        stdout=subprocess.DEVNULL,
        cwd=directory,
    )
    try:
        eventually(lambda: _listens(path))
        yield f"unix://{path}"
    finally:
        process.terminate()
        process.wait()


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0
