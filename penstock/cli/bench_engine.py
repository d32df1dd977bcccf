"""``penstock bench engine``."""

from __future__ import annotations

from penstock.cli.bench_command import run_measurement
from penstock.cli.command import Command
from penstock.config.bench import BenchEngineConfig
from penstock.config.origins import Origins


def run(config: BenchEngineConfig, origins: Origins) -> int:
    """Measure, print the report, write it to ``--json``. 1 when nothing could be measured."""
    from penstock.bench.engine_benchmark import measure, render

    return 1 if run_measurement(lambda say: measure(config, say), render, config.json) is None else 0


COMMAND = Command(("bench", "engine"), "Measure what a decode step costs the host.", BenchEngineConfig, run)
