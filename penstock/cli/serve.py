"""``penstock serve``: the config goes to the supervisor, which runs everything."""

from __future__ import annotations

from penstock.cli.command import Command
from penstock.config.options import ServeConfig
from penstock.config.origins import Origins


def run(config: ServeConfig, origins: Origins) -> int:
    """Serve until SIGINT or SIGTERM; the exit code is the supervisor's."""
    from penstock.supervisor.main import serve

    return serve(config, origins)


COMMAND = Command(
    ("serve",),
    "Serve a model over the OpenAI HTTP API. MODEL stands before options that take several values.",
    ServeConfig,
    run,
)
