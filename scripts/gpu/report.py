"""The results: a JSON file and a page in Markdown, rewritten after each measurement, so that both are whole
whenever the run is cut off."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any, Self, TextIO

RESULT = "measured: "
"""Comes before a measurement that a stage tells, on a line that others may have begun, such as pytest; JSON
follows: table, name and values."""
LOG_BYTES = 8 << 20
"""Of all output of the stages; more is cut."""


class Report:
    """``report.json``, ``report.md`` and ``log.txt`` in a folder; measurements are also printed.
    Use it as a context."""

    def __init__(self, folder: Path, terminal: TextIO) -> None:
        self.path = folder / "report.json"
        self._page = folder / "report.md"
        self._log = (folder / "log.txt").open("w", encoding="utf-8")
        self._log_left = LOG_BYTES
        self._terminal = terminal
        self.facts: dict[str, Any] = {}
        self.stages: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._log.close()

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads it any more; the files have it
            print(text, file=self._terminal, flush=True)
        self.log(text)

    def log(self, line: str) -> None:
        """Keeps a line of a stage's output."""
        self._log_left -= len(line) + 1
        if self._log_left > 0:
            with contextlib.suppress(OSError):  # the disk is full: the terminal has it
                self._log.write(line + "\n")
                self._log.flush()

    def fact(self, name: str, value: str) -> None:
        """Something about the machine or the run."""
        self.facts[name] = value
        self.say(f"{name}: {value}")
        self.write()

    def begin(self, letter: str, name: str, limit: float) -> None:
        """A stage begins; measurements are its own until the next one begins."""
        self._add(letter, name, "running", limit)
        self.say(f"== {letter}. {name}: at most {limit:.0f} s")

    def skip(self, letter: str, name: str, why: str) -> None:
        """A stage that is not begun; it has failed unless ``why`` begins with "skipped"."""
        self._add(letter, name, why, 0.0)
        self.say(f"== {letter}. {name}: {why}")

    def _add(self, letter: str, name: str, status: str, limit: float) -> None:
        self.stages.append({"stage": letter, "name": name, "status": status, "limit_s": round(limit, 1)})
        self.stages[-1] |= {"seconds": None, "measurements": [], "output": []}
        self.write()

    def take(self, line: str) -> None:
        """A line of the stage's output: a measurement, or anything else."""
        before, result, text = line.partition(RESULT)
        found = None
        with contextlib.suppress(ValueError):  # no result, or a stage that was killed within the line
            found = json.loads(text)
        if not (result and isinstance(found, dict) and found.keys() == {"table", "name", "values"}):
            self.log(line)
            return
        if before:
            self.log(before)
        told = self.stages[-1]["measurements"]
        told[:] = [each for each in told if (each["table"], each["name"]) != (found["table"], found["name"])]
        told.append(found)
        self.write()
        values = ", ".join(f"{name} {_shown(value)}" for name, value in found["values"].items())
        self.say(f"   {found['table']}: {found['name']}: {values}")

    def end(self, status: str, seconds: float, output: list[str]) -> None:
        """The stage has ended. Of one that failed, the end of its output is shown."""
        stage = self.stages[-1]
        failed = sum("error" in each["values"] for each in stage["measurements"])
        told = f"; {failed} of {len(stage['measurements'])} rows are errors" if failed else ""
        stage |= {"status": status + told, "seconds": round(seconds, 1)}
        if status != "done":
            stage["output"] = [line for line in output if RESULT not in line]
            for line in stage["output"]:
                self.say(f"   | {line}")
        self.say(f"== {stage['stage']}. {stage['name']}: {stage['status']} after {seconds:.1f} s")
        self.write()

    @property
    def failed(self) -> int:
        """Stages that did not end well, and measurements that failed."""
        well = ("done", "skipped")
        failures = [stage for stage in self.stages if not stage["status"].startswith(well)]
        return len(failures) + len([each for each in self._measurements() if "error" in each["values"]])

    def write(self) -> None:
        whole = json.dumps({"facts": self.facts, "stages": self.stages}, indent=1)
        for path, text in ((self.path, whole), (self._page, self.page())):
            new = path.with_suffix(f"{path.suffix}.{os.getpid()}")
            with contextlib.suppress(OSError):  # the disk is full: the last one stands
                new.write_text(text, encoding="utf-8")
                os.replace(new, path)

    def page(self) -> str:
        """The facts, a table of the stages, and a table for each kind of measurement, in Markdown."""
        parts = ["\n".join(f"- {name}: {value}" for name, value in self.facts.items())]
        rows = [
            {
                "stage": f"{stage['stage']}. {stage['name']}",
                "seconds": stage["seconds"],
                "limit": stage["limit_s"],
                "end": stage["status"],
            }
            for stage in self.stages
        ]
        parts.append(_table(rows))
        tables: dict[str, list[dict[str, Any]]] = {}
        for each in self._measurements():
            tables.setdefault(each["table"], []).append({"": each["name"]} | each["values"])
        parts += [f"### {title}\n\n{_table(rows)}" for title, rows in tables.items()]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _measurements(self) -> list[dict[str, Any]]:
        return [each for stage in self.stages for each in stage["measurements"]]


def _table(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[_shown(row.get(name)).replace("|", "\\|") for name in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else ""


def _shown(value: object) -> str:
    """Numbers with four digits or more."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else " ".join(str(value).split())
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
