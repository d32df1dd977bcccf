"""Clients of npm; their tests are JavaScript."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients import scripted as script

FOLDER = Path(__file__).parent / "node"


pytestmark = [
    pytest.mark.skipif(
        not (shutil.which("node") and (FOLDER / "node_modules").exists()), reason="needs node and npm ci"
    ),
    pytest.mark.timeout(240),
]


def run(file: str, **environ: str) -> None:
    done = subprocess.run(
        ["node", "--test", "--test-timeout=60000", file],
        cwd=FOLDER,
        env=os.environ | environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_the_clients_of_npm(url: str) -> None:
    run("clients.test.mjs", OPENAI_BASE_URL=url)


@pytest.mark.parametrize("file", ["rounds.test.mjs", "sdks.test.mjs"])
def test_rounds_of_a_tool(scripted: str, file: str) -> None:
    names = ("MODEL", "QUESTION", "TOOL", "THOUGHT", "SAYS", "RESULT", "REPORT")
    says = json.dumps({name: getattr(script, name) for name in names})
    run(file, SCRIPTED=says, SCRIPTED_URL=scripted)
