"""``penstock serve``: runs the supervisor, which starts all other processes."""

from __future__ import annotations

from penstock.cli.command import Command
from penstock.config.origins import Origins
from penstock.config.serve import ServeConfig


def run(config: ServeConfig, origins: Origins) -> int:
    """Serves until SIGINT or SIGTERM; returns the supervisor's exit code."""
    from penstock.supervisor.main import serve

    return serve(config, origins)


COMMAND = Command(
    ("serve",),
    "Serve a model over the OpenAI HTTP API. Put MODEL before options that take several values.",
    ServeConfig,
    run,
    handles_signals=True,
    replaces_servers=True,
)
