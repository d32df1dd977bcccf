"""Options of ``penstock status``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from penstock.config.describe import option, option_group
from penstock.config.options.connection import ConnectionOptions, ReadTimeout


@option_group
class StatusConfig(ConnectionOptions):
    """Options of ``penstock status``."""

    timeout: ReadTimeout = 10.0
    pid: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        option(
            "First process of a server on this machine, also of vLLM or SGLang: show for --interval seconds "
            "what share of a core its front end takes, with streams and tokens from --url/metrics.",
            "Server",
        ),
    ] = None
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
