"""``penstock bench gateway``."""

from __future__ import annotations

from penstock.cli.bench_command import run_measurement
from penstock.cli.command import Command
from penstock.config.bench import BenchGatewayConfig
from penstock.config.origins import Origins


def run(config: BenchGatewayConfig, origins: Origins) -> int:
    """Measure, print the report, write it to ``--json``. 1 when requests failed or nothing was measured."""
    from penstock.bench.gateway_benchmark import measure_gateway, render

    findings = run_measurement(lambda say: measure_gateway(config, say), render, config.json)
    return 1 if findings is None or findings.errors else 0


COMMAND = Command(
    ("bench", "gateway"), "Measure what relaying through the gateway costs.", BenchGatewayConfig, run
)
