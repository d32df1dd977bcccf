"""What pytest's processes tell while they run."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.gpu.checks import TOLD_EVERY, arguments
from scripts.gpu.machine import ROOT
from scripts.gpu.report import Report

TESTS = f"""
import pytest
@pytest.mark.parametrize("number", range({3 * TOLD_EVERY}))
def test_numbers(number):
    assert number != 5, "five is no number"
"""
CODE = """
import sys, pytest
from scripts.gpu.checks import Tally
tally = Tally("t")
pytest.main(["-q", "-c", "/dev/null", *sys.argv[1:]], plugins=[tally])
if sys.argv[1] == "-n0":
    tally.tell()
"""


@pytest.mark.parametrize("processes", ["-n1", "-n0"])
def test_results_are_taken_from_among_the_output_of_pytest(tmp_path: Path, processes: str) -> None:
    """With dots before them on their lines. Of the run with -n1 no last result is told, as where it is
    killed."""
    (tmp_path / "test_sample.py").write_text(TESTS)
    command = [sys.executable, "-c", CODE, processes, str(tmp_path / "test_sample.py")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    with Report(tmp_path, io.StringIO()) as report:
        report.begin("a", "tests", 10)
        for line in ended.stdout.splitlines():
            report.take(line)
    told = {each["table"]: each for each in report.stages[0]["measurements"]}
    assert told["t: failed"]["name"] == "test_sample.py::test_numbers[5]"
    assert "five is no number" in told["t: failed"]["values"]["error"]
    assert told["t"]["values"] == {"passed": 3 * TOLD_EVERY - 1, "failed": 1, "skipped": 0}


def test_a_rehearsal_runs_tests_in_other_processes_as_well() -> None:
    for what in ("engine", "families"):
        assert "--numprocesses=8" in arguments(what, "cuda", tiny=False)
        assert "--numprocesses=1" in arguments(what, "cpu", tiny=True)
