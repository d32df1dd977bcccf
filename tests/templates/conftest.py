from __future__ import annotations

from typing import Any

from tests.templates.summary import SUMMARY


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if SUMMARY.templates:
        terminalreporter.section("chat templates of real models")
        for line in SUMMARY.lines():
            terminalreporter.write_line(line)
