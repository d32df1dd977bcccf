"""``penstock status``: the load of a Penstock server or gateway, once or again and again."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from penstock.cli import terminal
from penstock.cli.command import Command
from penstock.config.errors import ConfigError
from penstock.config.origins import Origins
from penstock.config.status import StatusConfig

if TYPE_CHECKING:  # httpx is not imported at startup
    from penstock.client import Client


def run(config: StatusConfig, origins: Origins) -> int:
    """Print tables or JSON to standard output. 1 when the status cannot be read."""
    from penstock.cli.status_reading import StatusSource, status_of
    from penstock.cli.status_text import tables
    from penstock.cli.status_watch import make_display, watch
    from penstock.client import Client, ClientError

    if config.pid is not None and (config.watch or not config.interval):
        raise ConfigError("pid: shares are those of one --interval, which is not 0, without --watch")
    if config.watch and not config.interval:
        raise ConfigError("interval: 0 has no meaning with --watch, give the seconds between two readings")
    try:
        with Client(config.url, config.api_key, config.timeout) as client:
            if config.pid is not None:
                return _front_end(config, config.pid, client)
            source = StatusSource(client)
            if config.watch:
                return watch(source.read, make_display(as_json=config.json), interval_s=config.interval)
            earlier = later = source.read()
            if config.interval:
                time.sleep(config.interval)
                later = source.read()
    except ClientError as error:
        return terminal.report(error)
    status = status_of(earlier, later)
    print(json.dumps(status) if config.json else tables(status))
    return 0


def _front_end(config: StatusConfig, pid: int, client: Client) -> int:
    """Print what a server's processes take."""
    from penstock.bench.errors import BenchError
    from penstock.cli.front_end import text, watch

    try:
        found = watch(pid, client, config.interval)
    except BenchError as error:
        return terminal.report(error)
    print(json.dumps(found) if config.json else text(found))
    return 0


COMMAND = Command(
    ("status",),
    "Show the load of a gateway or a Penstock server.",
    StatusConfig,
    run,
    examples=(
        ("penstock status --watch", "engines and API servers, again and again"),
        (
            "penstock status --pid PID --interval 10",
            "does the front end limit this server, vLLM for instance?",
        ),
    ),
)
