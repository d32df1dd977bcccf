"""Runs targets of the Makefile that run tests, one after the other, and prints what became of each.

``test_all.py test test-ray``: a target that fails does not keep the others from running. The exit status is 1
if one failed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import dataclass, field

SUMMARY = re.compile(r"\b(\d+) (passed|failed|errors?|skipped)\b")
ENDS = re.compile(r" in [0-9.]+s( \([0-9:]+\))?( =+)?$")
COLUMNS = ("target", "passed", "failed", "skipped", "seconds", "exit status")


@dataclass
class Outcome:
    """Of one target; it may run pytest more than once. ``status`` is make's, None while it runs."""

    target: str
    counts: dict[str, int] = field(default_factory=lambda: {"passed": 0, "failed": 0, "skipped": 0})
    seconds: float = 0.0
    status: int | None = None

    def read(self, line: str) -> None:
        """Adds up the last line of a run of pytest, among all other lines."""
        if ENDS.search(line):
            for count, word in SUMMARY.findall(line):
                self.counts[word if word in self.counts else "failed"] += int(count)

    def row(self) -> tuple[str, ...]:
        status = "stopped" if self.status is None else str(self.status)
        return (self.target, *map(str, self.counts.values()), f"{self.seconds:.0f}", status)


def run(outcome: Outcome) -> None:
    began = time.monotonic()
    command = ["make", "--no-print-directory", outcome.target]
    try:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                outcome.read(line.rstrip())
        outcome.status = process.returncode
    finally:
        outcome.seconds = time.monotonic() - began


def table(outcomes: list[Outcome]) -> str:
    rows = [COLUMNS, *(outcome.row() for outcome in outcomes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    )


def main(targets: list[str]) -> int:
    outcomes: list[Outcome] = []
    try:
        for target in targets:
            print(f"==> make {target}", flush=True)
            outcomes.append(Outcome(target))
            run(outcomes[-1])
    except KeyboardInterrupt:
        pass
    print(f"\n{table(outcomes)}", flush=True)
    return int(len(outcomes) < len(targets) or any(outcome.status != 0 for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
