"""Options of ``python -m tests.soak``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from penstock.bench.server_process import BASE_MODEL_LEN, serve_command
from penstock.config.bench import Report, ServerArgs, Timeout, check_arguments
from penstock.config.describe import option, option_group
from penstock.config.options.synthetic import STEP_MS

SOAK_BACKLOG = 256 * 1024
"""Bytes a server holds for a client that does not read. Small, so that such clients are disconnected soon."""


@option_group
class SoakConfig:
    """Options of ``python -m tests.soak server``."""

    # -- load
    minutes: Annotated[float, option("Duration of the load, in minutes.", "Load", gt=0, le=10_000)] = 30.0
    requests: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        option("Requests after which the load ends, if earlier. Default: no limit.", "Load"),
    ] = None
    concurrency: Annotated[
        int, option("Number of clients, each with one request in flight.", "Load", ge=1, le=4096)
    ] = 48
    http2_share: Annotated[
        float, option("Share of the clients that use HTTP/2; the others use HTTP/1.1.", "Load", ge=0, le=1)
    ] = 0.5
    hostile: Annotated[
        int,
        option(
            "Number of hostile clients among the others: malformed, huge, cancelled, pipelined, slow.",
            "Load",
            ge=0,
            le=1024,
        ),
    ] = 4
    seed: Annotated[int, option("Seed of requests, client behaviour and faults.", "Load", ge=0)] = 0
    round_s: Annotated[
        float,
        option(
            "Time between two pauses, at which tokens are reconciled and memory is sampled, in seconds.",
            "Load",
            gt=0,
        ),
    ] = 60.0
    disturb_every: Annotated[
        float,
        option(
            "Mean time between faults (kill, hang, pause, rolling restart), in seconds; 0: none.",
            "Load",
            ge=0,
        ),
    ] = 5.0

    # -- server
    api_server_count: Annotated[int, option("Number of API server processes.", "Server", ge=1, le=64)] = 2
    engines: Annotated[int, option("Number of engine processes.", "Server", ge=1, le=64)] = 3
    step_ms: Annotated[float, option(STEP_MS, "Server", gt=0)] = 10.0
    hang_timeout: Annotated[
        float,
        option(
            "Time without a heartbeat before a process is killed and restarted, in seconds.", "Server", gt=0
        ),
    ] = 8.0
    gateway: Annotated[
        bool,
        option("Put a gateway in front of the server. Only engines are killed then.", "Server"),
    ] = False
    server_args: ServerArgs = None

    # -- bounds
    most_mib_per_hour: Annotated[
        float,
        option("Maximum growth of a process in the second half, in MiB per hour.", "Bounds", gt=0),
    ] = 12.0
    most_objects: Annotated[
        float,
        option("Maximum growth in tracked objects of a process, per 1,000 requests.", "Bounds", gt=0),
    ] = 200.0

    # -- report
    json: Report = None

    def __post_init__(self) -> None:
        """Raises ValueError for --server-args that are no command line."""
        check_arguments("--server-args", self.server_args)


@option_group
class GatewayMemoryConfig:
    """Options of ``python -m tests.soak gateway``."""

    requests: Annotated[int, option("Number of requests.", "Load", ge=10)] = 100_000
    clients: Annotated[
        int, option("Number of clients, each with one request in flight.", "Load", ge=1, le=1024)
    ] = 16
    seed: Annotated[int, option("Seed of the failure scenarios.", "Load", ge=0)] = 0
    timeout: Timeout = 3600.0
    json: Report = None


@option_group
class OutcomeSoakConfig:
    """Options of ``python -m tests.soak outcomes``."""

    minutes: Annotated[float, option("Duration of the load, in minutes.", "Load", gt=0, le=10_000)] = 30.0
    clients: Annotated[
        int, option("Number of clients, each with one request in flight.", "Load", ge=1, le=1024)
    ] = 24
    servers: Annotated[int, option("Number of model servers.", "Load", ge=2, le=64)] = 4
    disturb_every: Annotated[float, option("Mean time between faults, in seconds.", "Load", gt=0)] = 3.0
    most_out_s: Annotated[
        float,
        option("Maximum time for which a healthy server may be out, in seconds.", "Bounds", gt=0),
    ] = 5.0
    seed: Annotated[int, option("Seed of requests and faults.", "Load", ge=0)] = 0
    json: Report = None


@option_group
class WeightUpdatesConfig:
    """Options of ``python -m tests.soak weights``."""

    updates: Annotated[int, option("Number of updates.", "Load", ge=5, le=100_000)] = 200
    streams: Annotated[
        int, option("Number of clients, each with one stream at a time.", "Load", ge=1, le=4096)
    ] = 256
    pause_s: Annotated[float, option("Pause between two updates, in seconds.", "Load", ge=0)] = 0.2
    api_server_count: Annotated[int, option("Number of API servers.", "Server", ge=2, le=64)] = 3
    engines: Annotated[int, option("Number of engines.", "Server", ge=2, le=64)] = 2
    seed: Annotated[int, option("Seed of requests and kills.", "Load", ge=0)] = 0
    timeout: Timeout = 600.0
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
        "--api-server-hang-timeout": config.hang_timeout,
        "--max-model-len": BASE_MODEL_LEN * 2,
        "--max-stream-backlog": SOAK_BACKLOG,
        "--run-dir": run_dir,
    }
    serve, *further = serve_command(options, config.server_args)
    return [serve, "--allow-loopback-admin", *further]  # for /debug/gc
