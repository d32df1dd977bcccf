"""Files of deploy/, and the tools that check them, where they are installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import gateway, parser, serve
from penstock.cli.main import all_options
from penstock.config.gateway import GatewayConfig
from penstock.config.introspect import PREFIX
from penstock.config.serve import ServeConfig
from penstock.config.sources import resolve

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMMANDS = {"gateway": gateway.COMMAND, "serve": serve.COMMAND}


def config_of(words: list[str], environ: dict[str, str] | None = None) -> tuple[str, Any]:
    """The subcommand, and its config, of a command line that starts with it. Raises what the command does."""
    name, *arguments = words
    parsed, file, *_ = parser.parse(COMMANDS[name], arguments)
    config, *_ = resolve(COMMANDS[name].config, parsed, environ or {}, file=file, other_options=all_options)
    assert isinstance(config, ServeConfig | GatewayConfig)
    return name, config


def run_tool(program: str, *arguments: object, package: str) -> str:
    """Output of a tool; skips the test where the tool is missing, fails it when the tool does."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed ({package})")
    done = subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def all_texts() -> dict[Path, str]:
    return {path: path.read_text() for path in sorted(DEPLOY.rglob("*")) if path.is_file()}


def options_in(text: str) -> set[str]:
    """Flags like those of Penstock; a text may also have flags of other programs."""
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+(?![\w-])", text))


def variables_in(text: str) -> set[str]:
    return set(re.findall(rf"{PREFIX}[A-Z_]+", text))
