"""``penstock bench gateway-memory``."""

from __future__ import annotations

from penstock.cli.bench_command import run_measurement
from penstock.cli.command import Command
from penstock.config.bench import BenchGatewayMemoryConfig
from penstock.config.origins import Origins


def run(config: BenchGatewayMemoryConfig, origins: Origins) -> int:
    """Measure, print the report, write it to ``--json``. 1 when nothing could be measured."""
    from tests.soak.gateway_memory import measure_memory, render

    return 1 if run_measurement(lambda say: measure_memory(config, say), render, config.json) is None else 0


COMMAND = Command(
    ("bench", "gateway-memory"),
    "Measure whether the gateway's memory stays flat while requests fail in every way.",
    BenchGatewayMemoryConfig,
    run,
)
