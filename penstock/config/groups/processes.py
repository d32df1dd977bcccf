"""Options of the life of processes, their logs and their garbage."""

from __future__ import annotations

from typing import Annotated, Literal

from penstock.config.describe import option
from penstock.config.groups.hosts import HostOptions


class ProcessOptions(HostOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the life of processes, their logs and their garbage."""

    run_dir: Annotated[
        str | None, option("Directory for sockets, made 0700; default: a temporary one.", "Processes")
    ] = None
    startup_timeout: Annotated[
        float, option("Seconds a process has to become ready, per step of progress.", "Processes", gt=0)
    ] = 600.0
    engine_hang_timeout: Annotated[
        float,
        option(
            "Seconds an engine may be silent, at most one step, before it is killed and started again; 0: no "
            "limit.",
            "Processes",
            ge=0,
        ),
    ] = 60.0
    resume_timeout: Annotated[
        float,
        option(
            "Seconds a stream that lost its engine waits for another one to resume it; 0: streams end with "
            "their engine.",
            "Processes",
            ge=0,
        ),
    ] = 60.0
    drain_timeout: Annotated[
        float, option("Seconds running streams have to finish after SIGTERM or SIGINT.", "Processes", ge=0)
    ] = 5.0
    log_interval: Annotated[
        float,
        option(
            "Seconds between lines on what the fleet does, while it does anything; 0: none.",
            "Processes",
            ge=0,
        ),
    ] = 10.0
    profile_dir: Annotated[
        str | None,
        option(
            "Directory for what POST /start_profile and /stop_profile record; without it they are refused.",
            "Processes",
            metavar="DIR",
        ),
    ] = None
    gc_policy: Annotated[
        Literal["idle", "default", "off"],
        option(
            "When processes collect garbage. idle: while nothing runs, and in between within the pause "
            "budget; default: when Python would; off: not at all after the start.",
            "Processes",
        ),
    ] = "idle"
    gc_pause_budget_ms: Annotated[
        float,
        option(
            "Longest pause, in milliseconds, that policy idle makes while streams run.", "Processes", gt=0
        ),
    ] = 5.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], option("Least severity that is logged.", "Processes")
    ] = "info"
