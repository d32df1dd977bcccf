"""Makes a command of a measurement, with options and a report as those of ``penstock bench``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from penstock.bench.deadline import ProgressCallback
from penstock.cli.bench import run_measurement
from penstock.cli.command import Command
from penstock.config.origins import Origins


class Options(Protocol):
    """Options of a measurement."""

    @property
    def json(self) -> str | None:
        """File for the report."""


C = TypeVar("C", bound=Options)
R = TypeVar("R")


def measurement(
    name: str,
    help: str,
    options: type[C],
    measure: Callable[[C, ProgressCallback], R],
    render: Callable[[R], str],
    has_failed: Callable[[R], bool] = lambda report: False,
) -> Command[C]:
    """The command ``python -m NAME``, to be run by :func:`penstock.cli.main.run_script`. Its exit code is 1
    when nothing could be measured, and for a report that ``has_failed``."""

    def run(config: C, origins: Origins) -> int:
        report = run_measurement(lambda say: measure(config, say), render, config.json)
        return int(report is None or has_failed(report))

    return Command((name,), help, options, run)
