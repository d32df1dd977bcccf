"""Clients of npm; their tests are JavaScript."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "node"


@pytest.mark.skipif(
    not (shutil.which("node") and (FOLDER / "node_modules").exists()), reason="needs node and npm ci"
)
@pytest.mark.timeout(240)
def test_the_clients_of_npm(url: str) -> None:
    done = subprocess.run(
        ["node", "--test", "--test-timeout=60000", "clients.test.mjs"],
        cwd=FOLDER,
        env=os.environ | {"OPENAI_BASE_URL": url},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
