"""``penstock gateway``: a reverse proxy in front of model servers."""

from __future__ import annotations

import json

from penstock.cli.command import Command, ReadOptions
from penstock.cli.terminal import visible
from penstock.config.gateway import GatewayConfig
from penstock.config.origins import Origins
from penstock.exit_codes import EXIT_OK, EXIT_USAGE


def run(config: GatewayConfig, origins: Origins, read_again: ReadOptions[GatewayConfig]) -> int:
    """Serve until SIGINT or SIGTERM; SIGHUP reads the options again."""
    from penstock.metrics.gc_policy import frozen

    with frozen():
        from penstock.gateway.supervisor import serve

    return serve(config, origins, read_again)


def check(config: GatewayConfig, origins: Origins, problems: list[str]) -> int:
    """Print what is wrong and what holds; 2 when the gateway could not start."""
    from penstock.gateway.checking.check import check as check_all
    from penstock.gateway.checking.report_text import report_text

    report = check_all(config, origins, problems)
    print(json.dumps(report) if config.check == "json" else visible(report_text(report)))
    return EXIT_OK if report["ok"] else EXIT_USAGE


COMMAND = Command(
    ("gateway",),
    "Route requests to OpenAI-compatible model servers.",
    GatewayConfig,
    run,
    handles_signals=True,
    rereads_options=True,
    check=check,
)
