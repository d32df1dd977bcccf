"""``penstock bench host``."""

from __future__ import annotations

from penstock.cli.bench_command import run_measurement
from penstock.cli.command import Command
from penstock.config.bench import OF_STARTED_SERVER, BenchHostConfig
from penstock.config.errors import ConfigError
from penstock.config.origins import Origins


def run(config: BenchHostConfig, origins: Origins) -> int:
    """Measure, print the report, write it to ``--json``. 1 when requests failed or nothing could be measured.

    Raises ConfigError for options of a server that is not started here.
    """
    from penstock.bench import report
    from penstock.bench.host_benchmark import measure

    _check(config, origins)
    if len(config.api_server_count) > 1:
        return _compare(config)
    findings = run_measurement(lambda say: measure(config, say), report.render, config.json)
    return 1 if findings is None or findings.errors else 0


def _compare(config: BenchHostConfig) -> int:
    """Several numbers of API servers."""
    from penstock.bench import scaling

    findings = run_measurement(lambda say: scaling.measure(config, say), scaling.render, config.json)
    return 1 if findings is None or findings.errors else 0


def _check(config: BenchHostConfig, origins: Origins) -> None:
    if config.url is None:
        return
    for name in OF_STARTED_SERVER:
        if name in origins and origins[name].source == "command line":
            raise ConfigError(f"{origins[name]} is for a server that is started, it has no effect with --url")


COMMAND = Command(("bench", "host"), "Measure what an API server costs the host.", BenchHostConfig, run)
