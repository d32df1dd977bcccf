"""Stages a and b: tests of the torch engine on the device, by pytest; counts are told while they run."""

from __future__ import annotations

import collections
import sys

import pytest

from scripts.gpu.machine import ROOT
from scripts.gpu.measuring import Stage, tell

TOLD_EVERY = 10
"""Tests between two counts."""
SELECTED = {
    "engine": ["tests/engine/torch"],
    "families": ["tests/engine/torch"],
}
"""Arguments of pytest."""
REHEARSED = {
    "engine": ["tests/engine/torch/test_kernels.py"],
    "families": ["tests/engine/torch/test_half_precision.py"],
}


class Tally:
    """A plugin of pytest that counts outcomes, per file, and tells each failure."""

    def __init__(self, table: str) -> None:
        self._table = table
        self._counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self._seen = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        self._counts[report.location[0]][report.outcome] += 1
        self._seen += 1
        if report.failed:
            name = f"{report.nodeid}{'' if report.when == 'call' else f' ({report.when})'}"
            lines = (report.longreprtext.splitlines() or ["?"])[-3:]
            tell(f"{self._table}: failed", name.rpartition("/")[2], {"error": " / ".join(lines)[-160:]})
        if self._seen % TOLD_EVERY == 0:
            self.tell()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            tell(f"{self._table}: failed", report.nodeid, {"error": report.longreprtext[-160:]})

    def tell(self) -> None:
        for file, counts in sorted(self._counts.items()):
            values = {"passed": counts["passed"], "failed": counts["failed"], "skipped": counts["skipped"]}
            tell(self._table, file.rpartition("/")[2], values)
        self._seen = 0


def main() -> int:
    stage = Stage("what")
    what = stage.options.what
    chosen = (REHEARSED if stage.tiny else SELECTED)[what]
    table = {"engine": "a. tests of the torch engine", "families": "b. equality with transformers"}[what]
    tally = Tally(table)
    arguments = [f"--rootdir={ROOT}", f"--device={stage.device}", "--tb=short", *chosen]
    status = pytest.main(arguments, plugins=[tally])
    tally.tell()
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
