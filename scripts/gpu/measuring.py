"""What the stages share: their options, and measurements that are told as they are made and fail alone."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from scripts.gpu.report import RESULT

T = TypeVar("T")

MAX_ERROR = 200
"""Characters of an error in a table."""
MAX_WARNINGS = 10
"""Of a stage."""
STARTS = "starts"
"""The table of what starts, and of how long that takes."""


def shortened(text: str) -> str:
    """One line of a table: the beginning of a text, and its end, where most errors have their reason."""
    text = " ".join(text.split())
    if len(text) <= MAX_ERROR:
        return text
    return f"{text[: MAX_ERROR // 4]} … {text[-(MAX_ERROR * 3 // 4) :]}"


def tell(table: str, name: str, values: dict[str, Any]) -> None:
    """A measurement: a row of a table, whose columns are the names of the values, with their units."""
    line = json.dumps({"table": table, "name": name, "values": values})
    sys.stdout.write(f"{RESULT}{line}\n")  # whole, as other threads print as well
    sys.stdout.flush()


class OutOfTime(BaseException):
    """A measurement took longer than it may. No Exception, which an engine takes for the fault of a batch."""

    def __str__(self) -> str:
        return "the measurement took longer than it may"


class _Alarm:
    """The end of a measurement's time. ``held``: it waits until a call is over."""

    held = False
    late = False

    def ring(self, number: int, frame: FrameType | None) -> None:
        if not self.held:
            raise OutOfTime
        self.late = True


_alarm = _Alarm()


def whole(call: Callable[[], T]) -> T:
    """Calls without an end in the middle: OutOfTime is raised after it. For what would be left half done."""
    _alarm.held = True
    try:
        result = call()
    finally:
        _alarm.held = False
    if _alarm.late:
        raise OutOfTime
    return result


class Stage:
    """The process of one stage. ``tiny``: shapes for a rehearsal; ``seconds``: its limit."""

    def __init__(self, *positional: str) -> None:
        """Reads the command line: ``positional`` are names of arguments, then come the options of all."""
        parser = argparse.ArgumentParser()
        for name in positional:
            parser.add_argument(name)
        parser.add_argument("--seconds", type=float, required=True)
        parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
        parser.add_argument("--report", type=Path, required=True)
        parser.add_argument("--tiny", action="store_true")
        self.options = parser.parse_args()
        self.device: str = self.options.device
        self.tiny: bool = self.options.tiny
        self._positional = len(positional)
        self._warnings: set[str] = set()
        self._end = time.monotonic() + float(self.options.seconds)
        signal.signal(signal.SIGALRM, _alarm.ring)
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # servers are ended

    def left(self) -> float:
        """Seconds that are left to the stage."""
        return max(0.0, self._end - time.monotonic())

    def limit(self, seconds: float) -> float:
        """Seconds of a measurement that may take ``seconds``. A rehearsal is about no time: it has what is
        left."""
        return self.left() if self.tiny else min(seconds, self.left())

    @contextlib.contextmanager
    def measurement(self, table: str, name: str, seconds: float) -> Iterator[dict[str, Any]]:
        """A measurement of at most ``seconds``, whose values the block fills in.

        What it raises, and the end of its time, is the row's ``error``; the next measurement is made all the
        same. The values until then are told as well.
        """
        values: dict[str, Any] = {}
        began = time.monotonic()
        try:
            _alarm.late = False
            signal.setitimer(signal.ITIMER_REAL, max(0.1, self.limit(seconds)))
            yield values
        except (Exception, OutOfTime) as error:  # noqa: BLE001 - the other measurements go on
            signal.setitimer(signal.ITIMER_REAL, 0)
            traceback.print_exc(file=sys.stdout)
            values["error"] = shortened(f"{type(error).__name__}: {error}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        print(f"{table}: {name}: {time.monotonic() - began:.2f} s", flush=True)
        if values:
            tell(table, name, values)

    def warn(self, text: str) -> None:
        """A warning of what is measured, which may explain a figure; the first few are told."""
        text = shortened(text)
        if text not in self._warnings and len(self._warnings) < MAX_WARNINGS:
            self._warnings.add(text)
            tell("warnings", text, {"stage": " ".join(sys.argv[1 : 1 + self._positional])})

    def log_warnings(self) -> None:
        """Takes the warnings that are logged in this process; all of the log goes to its output as well."""
        logging.basicConfig(stream=sys.stdout, level=logging.INFO)
        handler = logging.Handler(logging.WARNING)

        def emit(record: logging.LogRecord) -> None:
            error = record.exc_info[1] if record.exc_info else None
            self.warn(record.getMessage() + (f": {type(error).__name__}: {error}" if error else ""))

        handler.emit = emit  # type: ignore[method-assign]
        logging.getLogger().addHandler(handler)

    def told(self, table: str, subject: str) -> dict[str, dict[str, Any]]:
        """What earlier stages of this run have told of a subject: values by the rest of the names in a table,
        which begin with the subject and a colon."""
        stages = json.loads(self.options.report.read_text(encoding="utf-8"))["stages"]
        rows = [each for stage in stages for each in stage["measurements"] if each["table"] == table]
        named = [(each["name"].partition(f"{subject}: "), each["values"]) for each in rows]
        return {rest: values for (before, found, rest), values in named if found and not before}
