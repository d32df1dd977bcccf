"""Options of processes: timeouts, figures in the log, profiles and garbage collection."""

from __future__ import annotations

from typing import Annotated, Literal

from penstock.config.describe import option, option_group

GcPolicy = Literal["idle", "default", "off"]


@option_group
class ProcessOptions:
    """Options of processes: timeouts, figures in the log, profiles and garbage collection."""

    run_dir: Annotated[
        str | None,
        option("Directory for sockets, created with mode 0700. Default: a temporary one.", "Processes"),
    ] = None
    startup_timeout: Annotated[
        float,
        option(
            "Maximum time between two progress reports of a starting process, in seconds.", "Processes", gt=0
        ),
    ] = 600.0
    engine_hang_timeout: Annotated[
        float,
        option(
            "Maximum time without a heartbeat before an engine is killed and restarted, in seconds. "
            "An engine sends none during a step. 0: no limit.",
            "Processes",
            ge=0,
        ),
    ] = 60.0
    api_server_hang_timeout: Annotated[
        float,
        option(
            "Maximum time without a heartbeat before an API server, or the coordinator, is killed and "
            "restarted, in seconds. 0: no limit.",
            "Processes",
            ge=0,
        ),
    ] = 60.0
    resume_timeout: Annotated[
        float,
        option(
            "Maximum time to resume a stream on another engine when its engine died, in seconds; 0: "
            "streams fail with their engine.",
            "Processes",
            ge=0,
        ),
    ] = 60.0
    log_interval: Annotated[
        float,
        option(
            "Throughput log interval, in seconds; silent when idle; 0: off.",
            "Processes",
            ge=0,
        ),
    ] = 10.0
    weights_dir: Annotated[
        str | None,
        option(
            "Directory in which weights that a trainer broadcasts are kept, which all engines must read. "
            "Default: /dev/shm.",
            "Processes",
            metavar="DIR",
        ),
    ] = None
    profile_dir: Annotated[
        str | None,
        option(
            "Directory for profiles of POST /start_profile and /stop_profile. Default: these "
            "requests are refused.",
            "Processes",
            metavar="DIR",
        ),
    ] = None
    gc_policy: Annotated[
        GcPolicy,
        option(
            "Garbage collection. idle: while nothing runs, otherwise in pauses of 5 ms; "
            "default: as Python does; off: never after startup.",
            "Processes",
        ),
    ] = "idle"
