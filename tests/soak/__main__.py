"""``python -m tests.soak COMMAND [options]``, run from a checkout; ``--help`` shows options.

``server`` loads a server, kills its processes and checks every token. ``gateway`` measures whether the
memory of the gateway stays flat while requests fail. ``outcomes`` disturbs model servers behind a gateway,
and compares what its clients see with what it says. ``weights`` updates the weights of a fleet under load and
checks the version of every token. Exit codes are those of ``penstock``.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from penstock.cli import parser
from penstock.cli.bench import run_measurement
from penstock.cli.command import Command
from penstock.cli.main import EXIT_INTERRUPTED, all_options
from penstock.config.errors import ConfigError
from penstock.config.origins import Origins
from penstock.config.sources import resolve
from penstock.exit_codes import EXIT_USAGE
from tests.soak import gateway_memory, outcome_soak, report, run, weight_updates
from tests.soak.config import GatewayMemoryConfig, OutcomeSoakConfig, SoakConfig, WeightUpdatesConfig

PROGRAM = "python -m tests.soak"


def soak_server(config: SoakConfig, origins: Origins) -> int:
    """1 when a check failed, or nothing could be measured."""
    found = run_measurement(lambda say: run.measure(config, say), report.render, config.json)
    return 0 if found is not None and found.passed else 1


def soak_gateway(config: GatewayMemoryConfig, origins: Origins) -> int:
    """1 when nothing could be measured."""
    found = run_measurement(
        lambda say: gateway_memory.measure_memory(config, say), gateway_memory.render, config.json
    )
    return 1 if found is None else 0


def soak_outcomes(config: OutcomeSoakConfig, origins: Origins) -> int:
    """1 when a check failed, or nothing could be measured."""
    found = run_measurement(lambda say: outcome_soak.measure(config, say), outcome_soak.render, config.json)
    return 0 if found is not None and not found.defects else 1


def soak_weights(config: WeightUpdatesConfig, origins: Origins) -> int:
    """1 when a check failed, or nothing could be measured."""
    found = run_measurement(
        lambda say: weight_updates.measure(config, say), weight_updates.render, config.json
    )
    return 0 if found is not None and not found.defects else 1


COMMANDS: tuple[Command[Any], ...] = (
    Command(("server",), "Load a server, kill its processes, check every token.", SoakConfig, soak_server),
    Command(
        ("gateway",),
        "Measure whether the gateway's memory stays flat while requests fail in every way.",
        GatewayMemoryConfig,
        soak_gateway,
    ),
    Command(
        ("outcomes",),
        "Disturb model servers behind a gateway; compare what clients see with what it says.",
        OutcomeSoakConfig,
        soak_outcomes,
    ),
    Command(
        ("weights",),
        "Update weights through a gateway, under streams and kills; check the version of every token.",
        WeightUpdatesConfig,
        soak_weights,
    ),
)


def main(argv: list[str]) -> int:
    """Runs one command and returns its exit code."""
    command = next((each for each in COMMANDS if [*each.name] == argv[:1]), None)
    if command is None:
        lines = [f"  {each.name[0]:8} {each.help}" for each in COMMANDS]
        print(f"usage: {PROGRAM} COMMAND [options]", *lines, sep="\n", file=sys.stderr)
        return EXIT_USAGE
    try:
        line = parser.parse(command, argv[1:], PROGRAM)
        config, origins, _ = resolve(
            command.config, line.arguments, os.environ, file=line.file, other_options=all_options
        )
        return command.run(config, origins)
    except ConfigError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
