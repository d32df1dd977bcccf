"""``penstock bench gateway``: measures and prints."""

import sys
from pathlib import Path

from penstock.cli.command import Command
from penstock.config.bench import BenchGatewayConfig
from penstock.config.origins import Origins


def run(config: BenchGatewayConfig, origins: Origins) -> int:
    """Measure, print the report, write it to ``--json``. 1 when requests failed or nothing was measured."""
    from penstock.bench.errors import BenchError
    from penstock.bench.gateway import measure_gateway, render

    try:
        report = measure_gateway(config, lambda line: print(line, file=sys.stderr, flush=True))
        print(render(report))
        if config.json is not None:
            Path(config.json).write_bytes(report.to_json())
    except (BenchError, OSError) as error:
        print(f"penstock: error: {error}", file=sys.stderr)
        return 1
    return 1 if report.errors else 0


COMMAND = Command(
    ("bench", "gateway"), "Measure what relaying through the gateway costs.", BenchGatewayConfig, run
)
