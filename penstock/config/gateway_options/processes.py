"""Options of the gateway: its processes, its access log and its bills."""

from __future__ import annotations

from typing import Annotated, Literal

from penstock.config.describe import option, option_group


@option_group
class WorkerOptions:
    """Options of the gateway: its processes and its access log."""

    workers: Annotated[
        int,
        option(
            "Processes that share the listening socket. More than one where one core is too slow for the "
            "events of all streams.",
            "Processes",
            ge=1,
            le=64,
        ),
    ] = 1
    worker_hang_timeout: Annotated[
        float,
        option(
            "Maximum time without a heartbeat before a worker is killed and restarted, in seconds. "
            "0: no limit.",
            "Processes",
            ge=0,
        ),
    ] = 60.0
    access_log: Annotated[
        Literal["none", "errors", "all"],
        option(
            "Requests to log when they finish, one JSON line each. errors: those that failed.", "Processes"
        ),
    ] = "errors"
    access_log_file: Annotated[
        str | None,
        option("File for the access log. Default: standard error, with other log messages.", "Processes"),
    ] = None
    log_content: Annotated[
        bool,
        option(
            "Write to the access log how errors of model servers, and malformed content, begin. They may "
            "quote prompts and outputs.",
            "Processes",
        ),
    ] = False
    billing_file: Annotated[
        str | None,
        option(
            "File with one JSON line for each request, exactly once: who sent it, tokens and cost. Its "
            "journals are in the folder FILE.journal.",
            "Processes",
            metavar="FILE",
        ),
    ] = None
