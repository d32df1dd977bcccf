"""``penstock bench soak``."""

from __future__ import annotations

from penstock.cli.bench_command import run_measurement
from penstock.cli.command import Command
from penstock.config.bench import BenchSoakConfig
from penstock.config.origins import Origins


def run(config: BenchSoakConfig, origins: Origins) -> int:
    """Soak, print the report, write it to ``--json``. 1 when the ledger does not hold, or nothing was run."""
    from tests.soak.report import render
    from tests.soak.run import measure

    findings = run_measurement(lambda say: measure(config, say), render, config.json)
    return 0 if findings is not None and findings.passed else 1


COMMAND = Command(
    ("bench", "soak"), "Load a server, kill its parts, check every token.", BenchSoakConfig, run
)
