"""Options of the gateway: its processes, shutdown and logs."""

from __future__ import annotations

from typing import Annotated, Literal

from penstock.config.describe import option
from penstock.config.gateway_options.telemetry import TelemetryOptions


class ProcessOptions(TelemetryOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the gateway: its processes, shutdown and logs."""

    workers: Annotated[
        int,
        option(
            "Processes that share the listening socket. More than one where one core is too slow for the "
            "events of all streams.",
            "Process",
            ge=1,
            le=64,
        ),
    ] = 1
    worker_hang_timeout: Annotated[
        float,
        option(
            "Maximum time without a heartbeat before a worker is killed and restarted, in seconds. "
            "0: no limit.",
            "Process",
            ge=0,
        ),
    ] = 60.0
    drain_timeout: Annotated[
        float,
        option("Maximum time for running requests to finish after SIGTERM, in seconds.", "Process", ge=0),
    ] = 60.0
    drain_grace: Annotated[
        float,
        option(
            "Time between SIGTERM and the shutdown, in seconds: /ready answers 503, but requests are relayed "
            "until load balancers have noticed. SIGINT (Ctrl-C) and a second signal end it.",
            "Process",
            ge=0,
        ),
    ] = 0.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], option("Minimum severity of log messages.", "Process")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"],
        option(
            "Format of log lines. json: one object per line, from the gateway, with time, level, process, "
            "logger, message, and exception or fields.",
            "Process",
        ),
    ] = "text"
    access_log: Annotated[
        Literal["none", "errors", "all"],
        option("Requests to log when they finish, one JSON line each. errors: those that failed.", "Process"),
    ] = "errors"
    access_log_file: Annotated[
        str | None,
        option("File for the access log. Default: standard error, with other log messages.", "Process"),
    ] = None
    log_content: Annotated[
        bool,
        option(
            "Write to the access log how errors of model servers, and malformed content, begin. They may "
            "quote prompts and outputs.",
            "Process",
        ),
    ] = False
