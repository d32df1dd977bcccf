from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from penstock.supervisor.startup.progress_display import (
    LogProgressDisplay,
    TerminalProgressDisplay,
    make_progress_display,
)
from penstock.wire.control import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_log_lines_tell_what_is_new(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    lines = LogProgressDisplay(clock)
    lines.progress("engine 0", Progress(text="loading weights", fraction=0.1))
    clock.now = 1.0
    lines.progress("engine 0", Progress(text="loading weights", fraction=0.2))
    lines.progress("engine 1", Progress(text="loading weights", fraction=0.3))
    lines.refresh()
    lines.progress("engine 0", Progress(text="warming up"))
    lines.progress("engine 0", Progress(text="ready", fraction=1.0))
    assert caplog.messages == [
        "engine 0: loading weights (10%)",
        "engine 1: loading weights (30%)",
        "engine 0: warming up",
        "engine 0: ready",
    ]


def test_log_lines_are_never_silent_while_processes_start(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    lines = LogProgressDisplay(clock)
    assert lines.refresh_s is not None  # the supervisor wakes for it
    clock.now = 4.0
    lines.refresh()
    lines.progress("engine 0", Progress(text="loading weights", fraction=0.1))
    lines.progress("engine 1", Progress(text="ready", fraction=1.0))
    clock.now = 7.0
    lines.progress("engine 0", Progress(text="loading weights", fraction=0.6))
    lines.refresh()
    clock.now = 8.0
    lines.refresh()
    lines.close()
    clock.now = 20.0
    lines.refresh()
    assert lines.refresh_s is None
    assert caplog.messages == [
        "starting for 4 s; processes load their libraries",
        "engine 0: loading weights (10%)",
        "engine 1: ready",
        "starting for 8 s; engine 0: loading weights (60%)",
    ]


def test_terminal_lines_redraw_one_line_per_child_and_go_away(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    screen = io.StringIO()
    lines = TerminalProgressDisplay(Console(file=screen, force_terminal=True, width=100))
    lines.progress("engine 0", Progress(text="loading [bold]weights", fraction=0.5))
    lines.progress("engine 1", Progress(text="reading"))
    lines.refresh()
    drawn = screen.getvalue()
    assert "engine 0" in drawn
    assert "loading [bold]weights" in drawn  # a child's text is no markup
    assert "engine 1" in drawn
    lines.close()
    assert lines.refresh_s is None
    after = len(screen.getvalue())
    lines.progress("engine 1", Progress(text="reading again"))
    lines.refresh()
    lines.close()
    assert len(screen.getvalue()) == after
    assert caplog.messages == ["engine 1: reading again"]


def test_what_is_no_terminal_gets_log_lines() -> None:
    assert isinstance(make_progress_display(), LogProgressDisplay)
