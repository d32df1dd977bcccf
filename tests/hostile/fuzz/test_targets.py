"""Every target with its seeds, with what once failed, and with random inputs."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hostile.fuzz.mutation import mutated
from tests.hostile.fuzz.targets import FINDINGS, TARGETS, Target

INPUTS = 400
MAX_S = 1.5
"""A loaded machine makes fewer inputs."""
SLOW_INPUTS = 20_000
FOUND = [(name, path) for name, target in TARGETS.items() for path in target.findings(name)]


def run(target: Target, count: int, seconds: float) -> None:
    for seed in target.seeds:
        target.run(seed)
    end = time.monotonic() + seconds
    for data in itertools.islice(mutated(target.seeds, 1), count):
        try:
            target.run(data)
        except Exception as error:
            raise AssertionError(f"fails for {data!r}") from error
        if time.monotonic() > end:
            break


@pytest.mark.parametrize("name", TARGETS)
def test_random_inputs(name: str) -> None:
    run(TARGETS[name], INPUTS, MAX_S)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_many_random_inputs(name: str) -> None:
    run(TARGETS[name], SLOW_INPUTS, 30.0)


@pytest.mark.parametrize(("name", "path"), FOUND, ids=lambda each: getattr(each, "name", each))
def test_what_once_failed(name: str, path: Path) -> None:
    TARGETS[name].run(path.read_bytes())


def test_findings_belong_to_targets() -> None:
    assert {path.name for path in FINDINGS.iterdir() if path.is_dir()} <= TARGETS.keys()


def test_the_command_runs_a_target(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.hostile.fuzz",
        "sse",
        "--seconds",
        "1",
        "--findings",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())
