"""``penstock gateway``: a reverse proxy in front of model servers."""

from __future__ import annotations

from penstock.cli.command import Command
from penstock.config.gateway import GatewayConfig
from penstock.config.origins import Origins


def run(config: GatewayConfig, origins: Origins) -> int:
    """Serves until SIGINT or SIGTERM."""
    from penstock.gateway.process import serve

    return serve(config, origins)


COMMAND = Command(
    ("gateway",),
    "Route requests to OpenAI-compatible model servers.",
    GatewayConfig,
    run,
    handles_signals=True,
)
