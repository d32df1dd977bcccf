"""Stages a and b: tests of the torch engine on the device, by pytest; counts are told while they run."""

from __future__ import annotations

import collections
import sys

import pytest

from scripts.gpu.machine import ROOT
from scripts.gpu.measuring import Stage, shortened, tell

TOLD_EVERY = 10
"""Tests between two counts."""
TESTS = ROOT / "tests" / "engine" / "torch"
FAMILIES = TESTS / "test_families.py"
TABLES = {"engine": "a. tests of the torch engine", "families": "b. equality with transformers"}


def arguments(what: str, device: str, *, tiny: bool) -> list[str]:
    """Those of pytest: what ``make test-gpu`` runs, in two parts; ``tiny``: a few of these."""
    processes = 1 if tiny else 8  # which compile kernels side by side
    given = [f"--rootdir={ROOT}", f"--device={device}", "--tb=short", f"--numprocesses={processes}"]
    if tiny and what == "families":
        return [*given, "-k=opt", str(FAMILIES)]
    if tiny:
        return [*given, "-k=half or mixed", str(TESTS / "test_sampler.py"), str(TESTS / "test_kernels.py")]
    selected = [FAMILIES] if what == "families" else [TESTS, f"--ignore={FAMILIES}"]
    return [*given, "-m=gpu", "--dist=worksteal", *map(str, selected)]


def reason(traceback: str) -> str:
    """The last error of a traceback as pytest prints it."""
    errors = [line.removeprefix("E ").strip() for line in traceback.splitlines() if line.startswith("E ")]
    return shortened(" ".join(errors[:3]) or traceback)


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
            tell(f"{self._table}: failed", name.rpartition("/")[2], {"error": reason(report.longreprtext)})
        if self._seen % TOLD_EVERY == 0:
            self.tell()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            tell(f"{self._table}: failed", report.nodeid, {"error": reason(report.longreprtext)})

    def tell(self) -> None:
        for file, counts in sorted(self._counts.items()):
            values = {"passed": counts["passed"], "failed": counts["failed"], "skipped": counts["skipped"]}
            tell(self._table, file.rpartition("/")[2], values)
        self._seen = 0


def main() -> int:
    stage = Stage("what")
    what = stage.options.what
    tally = Tally(TABLES[what])
    status = pytest.main(arguments(what, stage.device, tiny=stage.tiny), plugins=[tally])
    tally.tell()
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
