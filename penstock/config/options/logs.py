"""Options of log lines, for ``serve`` and ``gateway`` alike."""

from __future__ import annotations

from typing import Annotated, Literal

from penstock.config.describe import option, option_group


@option_group
class LogOptions:
    """Severity and format of log lines."""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], option("Minimum severity of log messages.", "Processes")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"],
        option(
            "Format of log lines. json: one object per line, from every process, with time, level, process, "
            "logger, message, and exception or fields.",
            "Processes",
        ),
    ] = "text"
