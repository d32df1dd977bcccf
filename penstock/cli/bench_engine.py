"""``penstock bench engine``: measures and prints."""

import sys
from pathlib import Path

from penstock.cli.command import Command
from penstock.config.bench import BenchEngineConfig
from penstock.config.origins import Origins


def run(config: BenchEngineConfig, origins: Origins) -> int:
    """Measure, print the report, write it to ``--json``. 1 when nothing could be measured."""
    from penstock.bench.engine import measure, render
    from penstock.bench.errors import BenchError

    try:
        report = measure(config, lambda line: print(line, file=sys.stderr, flush=True))
        print(render(report))
        if config.json is not None:
            Path(config.json).write_bytes(report.to_json())
    except (BenchError, OSError) as error:
        print(f"penstock: error: {error}", file=sys.stderr)
        return 1
    return 0


COMMAND = Command(("bench", "engine"), "Measure what a decode step costs the host.", BenchEngineConfig, run)
