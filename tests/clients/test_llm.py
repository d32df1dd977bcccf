"""Simon Willison's `llm` command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.clients.shapes import MODEL, QUESTION


@pytest.fixture
def environ(url: str, tmp_path: Path) -> dict[str, str]:
    entry = {"model_id": "demo", "model_name": MODEL, "api_base": url, "supports_tools": True}
    (tmp_path / "extra-openai-models.yaml").write_text(yaml.safe_dump([entry | {"supports_schema": True}]))
    return os.environ | {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}


def llm(environ: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-m", "llm", "-m", "demo", "-o", "max_tokens", "200", *arguments, QUESTION]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_text(environ: dict[str, str]) -> None:
    whole = llm(environ, "--no-stream", "-o", "temperature", "0")
    assert whole
    assert llm(environ, "-o", "temperature", "0") == whole


def test_a_schema(environ: dict[str, str]) -> None:
    assert '"sure"' in llm(
        environ,
        "--schema",
        '{"type": "object", "properties": {"sure": {"type": "boolean"}}, '
        '"required": ["sure"], "additionalProperties": false}',
    )


def test_a_tool(environ: dict[str, str]) -> None:
    assert llm(environ, "-T", "llm_version", "-o", "temperature", "0")
