"""Options of ``python -m tests.soak``."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.bench.server_process import BASE_MODEL_LEN, serve_command
from penstock.config.bench import Report, ServerArgs, Timeout, check_server_args
from penstock.config.describe import option
from penstock.config.groups.synthetic import STEP_MS

SOAK_BACKLOG = 256 * 1024
"""Bytes a server holds for a client that does not read. Small, so that such clients are disconnected soon."""


class SoakConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``python -m tests.soak server``."""

    # -- load
    minutes: Annotated[float, option("How long requests are sent.", "Load", gt=0, le=10_000)] = 30.0
    requests: Annotated[
        Annotated[int, Meta(ge=1)] | None, option("End after so many requests, if that is earlier.", "Load")
    ] = None
    concurrency: Annotated[
        int, option("Clients, with one request each at a time.", "Load", ge=1, le=4096)
    ] = 48
    seed: Annotated[
        int, option("Seed of requests, of how clients behave and of disturbances.", "Load", ge=0)
    ] = 0
    round_s: Annotated[
        float,
        option(
            "Seconds of load between two rests, at which tokens are balanced and memory is looked at.",
            "Load",
            gt=0,
        ),
    ] = 60.0
    disturb_every: Annotated[
        float,
        option(
            "Seconds between disturbances (kills, hangs, pauses, replacements), on average; 0: none.",
            "Load",
            ge=0,
        ),
    ] = 5.0

    # -- server
    api_server_count: Annotated[int, option("Number of API server processes.", "Server", ge=1, le=64)] = 2
    engines: Annotated[int, option("Number of engine processes.", "Server", ge=1, le=64)] = 3
    step_ms: Annotated[float, option(STEP_MS, "Server", gt=0)] = 10.0
    hang_timeout: Annotated[
        float, option("Seconds an engine may be silent before it is replaced.", "Server", gt=0)
    ] = 8.0
    server_args: ServerArgs = None

    # -- bounds
    most_mib_per_hour: Annotated[
        float,
        option("Most that a process may grow by over the second half, in MiB an hour.", "Bounds", gt=0),
    ] = 12.0
    most_objects: Annotated[
        float,
        option("Most objects that a process may track more after 1,000 requests.", "Bounds", gt=0),
    ] = 200.0

    # -- report
    json: Report = None

    def __post_init__(self) -> None:
        """Raises ValueError for --server-args that are no command line."""
        check_server_args(self.server_args)


class GatewayMemoryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``python -m tests.soak gateway``."""

    requests: Annotated[int, option("Requests in all.", "Load", ge=10)] = 100_000
    clients: Annotated[int, option("Requests at a time.", "Load", ge=1, le=1024)] = 16
    seed: Annotated[int, option("Seed of what becomes of requests.", "Load", ge=0)] = 0
    timeout: Timeout = 3600.0
    json: Report = None


def soak_arguments(config: SoakConfig, run_dir: str) -> list[str]:
    """The command line of the server under test; ``--server-args`` come last and win."""
    options = {
        "--engine": "synthetic",
        "--port": 0,
        "--synthetic-step-ms": config.step_ms,
        "--api-server-count": config.api_server_count,
        "--data-parallel-size": config.engines,
        "--engine-hang-timeout": config.hang_timeout,
        "--max-model-len": BASE_MODEL_LEN * 2,
        "--max-stream-backlog": SOAK_BACKLOG,
        "--run-dir": run_dir,
    }
    return serve_command(options, config.server_args)
