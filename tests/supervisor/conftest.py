from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from penstock.config.serve import ServeConfig
from tests.supervisor.harness import PATIENCE_S, Running, Serve

HERE = Path(__file__).parent


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """Sockets have short names, and pytest's own directories may have too long ones."""
    with tempfile.TemporaryDirectory(prefix="run-", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def serve(tmp_path: Path, short_dir: Path) -> Iterator[Serve]:
    """Starts supervisors. Keyword arguments are options; ``behaviour`` tells the fake children what to do."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    temporary = short_dir / "tmp"
    temporary.mkdir()
    started: list[Running] = []

    def start(
        behaviour: dict[str, list[str]] | None = None, *, terminal: int | None = None, **options: object
    ) -> Running:
        options = {
            "model": str(model),
            "engine": "synthetic",
            "port": 0,
            "drain_timeout": PATIENCE_S,
        } | options
        config = msgspec.json.encode(msgspec.convert(options, ServeConfig)).decode()
        command = [sys.executable, str(HERE / "run_serve.py"), config, json.dumps(behaviour or {})]
        env = os.environ | {
            # It imports from where this process does.
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            # What a killed one leaves goes with the test.
            "TMPDIR": str(temporary),
        }
        started.append(Running(command, env, terminal))
        return started[-1]

    yield start
    for running in started:
        running.close()
