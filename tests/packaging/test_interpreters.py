"""The wheel, installed into a clean environment of every supported Python that this machine has."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from penstock import __version__
from tests.packaging.conftest import ROOT, Built

SUPPORTED = ("3.11", "3.12", "3.13", "3.14")
WAIT_S = 60.0
INSTALL_S = 300.0


def interpreter(version: str) -> str | None:
    """On PATH, or among pyenv's, whose commands on PATH fail for versions that are not selected."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python{version}"))]
    for path in filter(None, found):
        command = [str(path), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        if subprocess.run(command, capture_output=True, text=True).stdout.strip() == version:
            return str(path)
    return None


@contextmanager
def penstock(environment: Path, *arguments: str) -> Iterator[str]:
    """The installed command; gives its URL. Any DeprecationWarning ends it."""
    process = subprocess.Popen(
        [str(environment / "bin" / "penstock"), *arguments],
        cwd=environment,
        env={name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        | {"PYTHONWARNINGS": "error::DeprecationWarning"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    log = ""
    try:
        while not re.search(r"^ready in", log, re.MULTILINE):
            line = process.stdout.readline()
            assert line, log
            log += line
        found = re.search(r"http://127\.0\.0\.1:\d+", log)
        assert found is not None, log
        yield found.group()
    finally:
        process.terminate()
        rest, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, log + rest


@pytest.mark.slow
@pytest.mark.timeout(2 * INSTALL_S)
@pytest.mark.parametrize("version", SUPPORTED)
def test_the_wheel_serves(version: str, built: Built, tmp_path: Path) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    environment = tmp_path / "environment"
    # Without pip: Debian's Pythons keep it in a package of its own.
    subprocess.run([python, "-m", "venv", "--without-pip", environment], check=True)
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install", "--quiet"]
    subprocess.run([*pip, "-c", ROOT / "constraints.txt", built.wheel], check=True, timeout=INSTALL_S)

    versions = subprocess.run(
        [environment / "bin" / "penstock", "version"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    ).stdout.splitlines()
    assert versions[0] == f"penstock {__version__}"
    assert versions[1].startswith(f"python {version}.")

    body = {"prompt": "hello", "max_tokens": 8, "stream": True}
    with (
        penstock(environment, "serve", "--engine", "synthetic", "--port", "0") as server,
        penstock(environment, "gateway", "--endpoints", server, "--port", "0") as gateway,
    ):
        for url in (server, gateway):
            reply = httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_S)
            assert reply.status_code == 200, reply.text
            assert reply.text.endswith("data: [DONE]\n\n")
            assert reply.text.count("data: ") >= 8
