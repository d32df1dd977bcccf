"""The files of a report after each line of a stage."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.gpu.report import RESULT, Report


def line(table: str, name: str, **values: object) -> str:
    return RESULT + json.dumps({"table": table, "name": name, "values": values})


@pytest.fixture
def terminal() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def report(tmp_path: Path, terminal: io.StringIO) -> Iterator[Report]:
    with Report(tmp_path, terminal) as report:
        yield report


def test_files_are_whole_after_every_measurement(
    report: Report, tmp_path: Path, terminal: io.StringIO
) -> None:
    report.fact("GPU", "a | b")
    report.begin("c", "steps", 10)
    report.take(line("c. steps", "1 stream", ms=0.123456, count=2000))
    report.take("a line of the log")
    report.take(line("c. steps", "64 streams", error="x | y"))
    report.take(RESULT + '{"table": "c. steps", "na')
    report.take(RESULT + "[]")
    report.take(line("c. steps", "1 stream", ms=2.0, count=2000))
    whole = json.loads((tmp_path / "report.json").read_text())
    assert whole["facts"] == {"GPU": "a | b"}
    assert whole["stages"][0]["status"] == "running"
    assert [each["name"] for each in whole["stages"][0]["measurements"]] == ["64 streams", "1 stream"]
    assert report.failed == 2  # the stage still runs, and one measurement has an error
    report.end("done", 1.25, ["last words"])
    page = (tmp_path / "report.md").read_text()
    assert page == (
        "- GPU: a | b\n\n"
        "| stage | seconds | limit | end |\n| --- | --- | --- | --- |\n"
        "| c. steps | 1.2 | 10 | done; 1 of 2 rows are errors |\n\n"
        "### c. steps\n\n"
        "|  | error | ms | count |\n| --- | --- | --- | --- |\n"
        "| 64 streams | x \\| y |  |  |\n| 1 stream |  | 2 | 2,000 |\n"
    )
    log = (tmp_path / "log.txt").read_text()
    assert "a line of the log\n" in log
    assert '{"table": "c. steps", "na\n' in log
    assert "last words" not in terminal.getvalue()
    assert "c. steps: 1 stream: ms 0.1235, count 2,000" in terminal.getvalue()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.txt", "report.json", "report.md"]


def test_the_end_of_the_output_of_a_failed_stage_is_kept(report: Report, terminal: io.StringIO) -> None:
    report.begin("a", "tests", 10)
    report.end("exit status 1", 1.0, [line("t", "n", ms=1), "last words"])
    assert report.stages[0]["output"] == ["last words"]
    assert "   | last words\n" in terminal.getvalue()
