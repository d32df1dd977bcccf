"""Options of the life of processes, their logs and their garbage."""

from __future__ import annotations

from typing import Annotated, Literal

from penstock.config.describe import option

RunDir = Annotated[
    str | None, option("Directory for sockets, made 0700; default: a temporary one.", "Processes")
]

StartupTimeout = Annotated[
    float, option("Seconds a process has to become ready, per step of progress.", "Processes", gt=0)
]

EngineHangTimeout = Annotated[
    float,
    option(
        "Seconds an engine may be silent, at most one step, before it is killed and started again; 0: no "
        "limit.",
        "Processes",
        ge=0,
    ),
]

ResumeTimeout = Annotated[
    float,
    option(
        "Seconds a stream that lost its engine waits for another one to resume it; 0: streams end with "
        "their engine.",
        "Processes",
        ge=0,
    ),
]

DrainTimeout = Annotated[
    float, option("Seconds running streams have to finish after SIGTERM or SIGINT.", "Processes", ge=0)
]

LogInterval = Annotated[
    float,
    option(
        "Seconds between lines on what the fleet does, while it does anything; 0: none.",
        "Processes",
        ge=0,
    ),
]

ProfileDir = Annotated[
    str | None,
    option(
        "Directory for what POST /start_profile and /stop_profile record; without it they are refused.",
        "Processes",
        metavar="DIR",
    ),
]

GcPolicy = Annotated[
    Literal["idle", "default", "off"],
    option(
        "When processes collect garbage. idle: while nothing runs, and in between within the pause "
        "budget; default: when Python would; off: not at all after the start.",
        "Processes",
    ),
]

GcPauseBudgetMs = Annotated[
    float,
    option("Longest pause, in milliseconds, that policy idle makes while streams run.", "Processes", gt=0),
]

LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"], option("Least severity that is logged.", "Processes")
]
