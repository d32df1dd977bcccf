"""All measurements on one GPU within a few minutes, for a machine without a network.

    python -m scripts.gpu.run --wheels wheels --out report

Runs stages one after the other, each in processes of its own with a time limit. A measurement is printed and
written as soon as it is made; a stage that fails or hangs costs its own time only. Penstock need not be
installed: the repository is on the stages' path, and so are the wheels of the folder ``--wheels``
(``python -m scripts.gpu.fetch_wheels`` fills it). Before the first stage it looks for what they need: where
that is missing, it says so in a line, and its exit status is 2. docs/gpu.md describes the results.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from scripts.gpu.children import adopt_orphans, end_tree, run_child
from scripts.gpu.machine import environment, facts, unpack_wheels
from scripts.gpu.plan import STAGES, Stage, limit, rehearsed
from scripts.gpu.preflight import NEEDS, look
from scripts.gpu.report import Report

SPARE_S = 5.0
"""Kept for the end of processes."""
MAX_MINUTES = 24 * 60
MIN_S = 1.0
"""A stage with less time is not begun."""


def main(arguments: Sequence[str], stages: Sequence[Stage] = STAGES, needs: tuple[str, ...] = NEEDS) -> int:
    """1 when a stage or a measurement failed; 2 when something is missing, such as one of these modules."""
    options = _options(arguments, stages)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8
    end = time.monotonic() + options.minutes * 60 - SPARE_S
    adopt_orphans()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    with (
        Report(options.out, sys.stdout) as report,
        tempfile.TemporaryDirectory(prefix="penstock-gpu-", ignore_cleanup_errors=True) as site,
    ):
        for name, value in facts():
            report.fact(name, value)
        given = environment(Path(site), options.device)
        chosen = [stage for stage in stages if any(stage.is_called(name) for name in options.stages)]
        needs = (*needs, *dict.fromkeys(name for stage in chosen for name in stage.needs))
        if options.wheels is not None:
            report.fact("wheels", unpack_wheels(options.wheels, Path(site)))
        found = look(options.device, needs, given)
        for name, value in found.facts.items():
            report.fact(name, value)
        for problem in found.problems:
            report.say(f"no stage is begun: {problem}")
        if found.problems:
            return 2
        _run_stages(options, rehearsed(chosen) if options.tiny else chosen, end, report, given, found.free)
        report.say(f"{report.path}: {report.failed} failed")
        return int(report.failed > 0)


def _stop(number: int, frame: FrameType | None) -> None:
    """Ends the stage that runs; what it has told stands."""
    sys.exit(128 + number)


def _run_stages(
    options: argparse.Namespace,
    stages: Sequence[Stage],
    end: float,
    report: Report,
    given: dict[str, str],
    free: int | None,
) -> None:
    """``free``: bytes of the device's memory before the first stage, if they are known."""
    for index, stage in enumerate(stages):
        seconds = limit(end - time.monotonic(), stages[index:])
        why = "not begun: no time is left" if seconds < MIN_S else ""
        if free is not None and free < stage.gib * 2**30:
            why = f"skipped: it needs {stage.gib:.0f} GiB of the device, {free / 2**30:.1f} are free"
        if why:
            report.skip(stage.letter, stage.name, why)
            continue
        report.begin(stage.letter, stage.name, seconds)
        command = [sys.executable, *stage.arguments, f"--seconds={seconds:.1f}", f"--device={options.device}"]
        command += [f"--report={report.path}", *(["--tiny"] if options.tiny else [])]
        try:
            ended = run_child(command, seconds, report.take, given)
        except SystemExit as error:
            report.end(f"interrupted, exit status {error.code}", 0.0, [])
            raise
        end_tree(os.getpid())
        report.end(ended.status, ended.seconds, ended.tail)


def _options(arguments: Sequence[str], stages: Sequence[Stage]) -> argparse.Namespace:
    letters = list(dict.fromkeys(stage.letter for stage in stages))
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gpu.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--wheels", type=Path, help="folder with the wheels that this Python lacks")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder for report.json, report.md and log.txt, which are overwritten",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=9.0, help="limit of the whole run")
    parser.add_argument(
        "--stages",
        type=lambda text: text.split(","),
        default=letters,
        help="letters, or parts of names, such as llama; d takes its steps from c of the same run. "
        f"Default: {','.join(letters)}",
    )
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: a rehearsal on a CPU")
    options = parser.parse_args(arguments)
    if not 0 < options.minutes <= MAX_MINUTES:
        parser.error(f"--minutes {options.minutes:g}: more than 0, at most {MAX_MINUTES}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.out).close()
    except OSError as error:
        parser.error(f"--out {options.out}: {error}")
    for name in options.stages:
        if not any(stage.is_called(name) for stage in stages):
            parser.error(f"--stages {name}: no such stage; there are {', '.join(letters)}")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
