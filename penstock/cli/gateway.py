"""``penstock gateway``: a reverse proxy in front of model servers."""

from __future__ import annotations

from penstock.cli.command import Command
from penstock.config.gateway import GatewayConfig
from penstock.config.origins import Origins


def run(config: GatewayConfig, origins: Origins) -> int:
    """Serve until SIGINT or SIGTERM."""
    from penstock.gateway.process import serve

    return serve(config, origins)


COMMAND = Command(
    ("gateway",),
    "Spread requests over OpenAI-compatible model servers, and see how they end.",
    GatewayConfig,
    run,
)
