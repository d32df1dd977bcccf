"""Options of ``penstock status``."""

from __future__ import annotations

from typing import Annotated

from penstock.config.describe import option, option_group
from penstock.config.options.connection import ConnectionOptions, ReadTimeout


@option_group
class StatusConfig(ConnectionOptions):
    """Options of ``penstock status``."""

    timeout: ReadTimeout = 10.0
    interval: Annotated[
        float,
        option(
            "Time between the readings that rates are computed from, in seconds; 0: one reading, no rates.",
            "Output",
            ge=0,
        ),
    ] = 1.0
    json: Annotated[bool, option("Print one JSON object instead of tables.", "Output")] = False
    watch: Annotated[
        bool,
        option(
            "Show the status again and again until Ctrl-C: in place on a terminal, else a line each time.",
            "Output",
        ),
    ] = False
