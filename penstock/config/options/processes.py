"""Options of processes: timeouts, logs, spans and garbage collection."""

from __future__ import annotations

from typing import Annotated, Literal

from penstock.config.describe import option
from penstock.config.options.attach import AttachOptions
from penstock.config.options.tracing import OtlpEndpoint, OtlpSamplingRatio, OtlpServiceName

LogFormat = Literal["text", "json"]
GcPolicy = Literal["idle", "default", "off"]


class ProcessOptions(AttachOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of processes: timeouts, logs, spans and garbage collection."""

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
    drain_timeout: Annotated[
        float,
        option(
            "Maximum time for running streams to finish after SIGTERM or SIGINT, in seconds.",
            "Processes",
            ge=0,
        ),
    ] = 5.0
    drain_grace: Annotated[
        float,
        option(
            "Time between SIGTERM and the shutdown, in seconds: /ready answers 503, but requests are served "
            "until load balancers have noticed. SIGINT (Ctrl-C) and a second signal end it.",
            "Processes",
            ge=0,
        ),
    ] = 0.0
    log_interval: Annotated[
        float,
        option(
            "Throughput log interval, in seconds; silent when idle; 0: off.",
            "Processes",
            ge=0,
        ),
    ] = 10.0
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
            "Garbage collection. idle: while nothing runs, otherwise within --gc-pause-budget-ms; "
            "default: as Python does; off: never after startup.",
            "Processes",
        ),
    ] = "idle"
    gc_pause_budget_ms: Annotated[
        float,
        option(
            "Maximum pause for garbage collection while streams run, in milliseconds, for --gc-policy idle.",
            "Processes",
            gt=0,
        ),
    ] = 5.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], option("Minimum severity of log messages.", "Processes")
    ] = "info"
    log_format: Annotated[
        LogFormat,
        option(
            "Format of log lines. json: one object per line, from every process, with time, level, process, "
            "logger, message, and exception or fields.",
            "Processes",
        ),
    ] = "text"

    otlp_endpoint: OtlpEndpoint = None
    otlp_sampling_ratio: OtlpSamplingRatio = 1.0
    otlp_service_name: OtlpServiceName = "penstock"
