"""Shows the progress of the start: live lines on a terminal, log lines everywhere else."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from penstock.wire.control import Progress

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger(__name__)

_MAX_SILENCE_S = 4.0
_MAX_SILENCE_S = 4.0


class ProgressDisplay(Protocol):
    """Shows the progress of children that start."""

    refresh_s: float | None
    """Seconds between calls of :meth:`refresh`; None: never."""

    def progress(self, process: str, progress: Progress) -> None:
        """A child reports progress."""

    def refresh(self) -> None:
        """Redraws; called after every event and every ``refresh_s``."""

    def close(self) -> None:
        """The first start is over, successful or not. May be called again."""


class LogProgressDisplay:
    """A log line when a child reports something new, and one on all that start after 4 seconds of silence."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.refresh_s: float | None = 0.5
        self._clock = clock
        self._latest: dict[str, Progress] = {}
        self._began = self._said = clock()

    def progress(self, process: str, progress: Progress) -> None:
        before = self._latest.get(process)
        self._latest[process] = progress
        if before is None or before.text != progress.text:
            self._say(f"{process}: {_described(progress)}")

    def refresh(self) -> None:
        now = self._clock()
        if self.refresh_s is None or now - self._said < _MAX_SILENCE_S:
            return
        waits = "; ".join(
            f"{process}: {_described(progress)}"
            for process, progress in self._latest.items()
            if progress.fraction is None or progress.fraction < 1.0
        )
        self._say(f"starting for {now - self._began:.0f} s; {waits or 'processes load their libraries'}")

    def close(self) -> None:
        self.refresh_s = None

    def _say(self, text: str) -> None:
        self._said = self._clock()
        log.info("%s", text)


def _described(progress: Progress) -> str:
    partly = progress.fraction is not None and progress.fraction < 1.0
    return f"{progress.text} ({progress.fraction:.0%})" if partly else progress.text


class TerminalProgressDisplay:
    """One status line per child that reports progress, redrawn in place and removed at the end."""

    def __init__(self, console: Console | None = None) -> None:
        """``console`` is standard error by default."""
        from rich.console import Console
        from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        self.refresh_s: float | None = 0.1
        self._tasks: dict[str, TaskID] = {}
        self._after = LogProgressDisplay()
        # No thread of rich's own: the supervisor's loop redraws.
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.fields[process]}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=console or Console(stderr=True),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
        )
        self._bars.start()

    def progress(self, process: str, progress: Progress) -> None:
        """After :meth:`close`, when a child is restarted, a log line."""
        if self.refresh_s is None:
            self._after.progress(process, progress)
            return
        task = self._tasks.get(process)
        if task is None:
            task = self._tasks[process] = self._bars.add_task("", process=process, total=None)
        known = progress.fraction is not None
        self._bars.update(
            task,
            description=progress.text,
            total=1.0 if known else None,
            completed=progress.fraction if known else 0.0,
        )

    def refresh(self) -> None:
        if self.refresh_s is not None:
            with contextlib.suppress(OSError):  # the terminal was closed
                self._bars.refresh()

    def close(self) -> None:
        self.refresh_s = None
        with contextlib.suppress(OSError):
            self._bars.stop()


def make_progress_display(*, live: bool = True) -> ProgressDisplay:
    """Live lines if ``live`` and standard error is a terminal, log lines otherwise."""
    return TerminalProgressDisplay() if live and sys.stderr.isatty() else LogProgressDisplay()
