"""``penstock gateway``: a reverse proxy in front of model servers."""

from __future__ import annotations

from penstock.cli.command import Command, ReadOptions
from penstock.config.gateway import GatewayConfig
from penstock.config.origins import Origins


def run(config: GatewayConfig, origins: Origins, read_again: ReadOptions[GatewayConfig]) -> int:
    """Serve until SIGINT or SIGTERM; SIGHUP reads the options again."""
    from penstock.gateway.supervisor import serve

    return serve(config, origins, read_again)


COMMAND = Command(
    ("gateway",),
    "Route requests to OpenAI-compatible model servers.",
    GatewayConfig,
    run,
    handles_signals=True,
    rereads_options=True,
)
